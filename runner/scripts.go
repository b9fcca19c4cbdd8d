package runner

// Scripts that run on the host under /bin/sh. Those with "nix" in them start with
// toolPath, since a session that runs no login shell may not find Nix.

const toolPath = `PATH=/run/current-system/sw/bin:/nix/var/nix/profiles/default/bin:$PATH:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
`

// attended says whether a deployer other than $2 reads record $1: a waiting one
// leaves the uptime of its last look, and may be away for as long as it takes to
// dial again.
const attended = `
B=/var/lib/tf-hosts/runs
attended() {
	read -r now _ </proc/uptime
	for reader in "$1"/readers/*; do
		[ -e "$reader" ] && [ "${reader##*/}" != "$2" ] || continue
		seen=$(cat "$reader")
		seen=$((${now%.*} - ${seen:-0}))
		[ "$seen" -ge 0 ] && [ "$seen" -lt 10 ] && return 0
	done
	return 1
}
`

// observeScript prints one "key value" a line. $1 is the wanted system, $2 the
// name of the deployer. The boot
// default is read where a boot loader says it in plain text: systemd-boot and GRUB.
const observeScript = toolPath + attended + `
P=/nix/var/nix/profiles/system
say() { printf '%s %s\n' "$1" "$2"; }
link() { [ -e "$2" ] && say "$1" "$(readlink -f "$2")"; }
say arch "$(uname -m)"
say boot_id "$(cat /proc/sys/kernel/random/boot_id)"
link running /run/current-system
link booted /run/booted-system
link profile "$P"
say generation "$(readlink "$P")"
entry=$(sed -n 's/^default[[:space:]]*//p' /boot/loader/loader.conf 2>/dev/null | head -n 1)
for f in "/boot/loader/entries/$entry" "/boot/loader/entries/$entry.conf" /boot/grub/grub.cfg; do
	[ -f "$f" ] || continue
	say default "$(sed -n 's|.*init=\(/nix/store/[^/]*\)/init.*|\1|p' "$f" | head -n 1)"
	break
done
for part in kernel initrd kernel-modules init-interface-version; do
	new=$1/$part old=/run/booted-system/$part
	[ -e "$1" ] && [ -e /run/booted-system ] || break
	[ -e "$new" ] || [ -e "$old" ] || continue
	[ "$(readlink -f "$new")" = "$(readlink -f "$old")" ] || cmp -s "$new" "$old" || say pending "$part"
done
df -Pk /nix/store 2>/dev/null | { read -r _ && read -r _ _ _ free _ && say free "$free"; }
command -v nix-store >/dev/null && say nix yes
nix-store --check-validity "$1" 2>/dev/null && say valid yes
if [ -d /run/systemd/system ]; then
	say systemd yes
	systemctl list-units --state=failed --plain --no-legend --no-pager --full 2>/dev/null |
		while read -r unit _; do say failed "$unit"; done
fi
# Records of earlier activations: NAME STATE PHASE ACTION SYSTEM.
for D in "$B"/*; do
	[ -e "$D/phase" ] || [ -e "$D/verdict" ] || continue
	name=${D##*/} state=gone
	if [ -e "$D/verdict" ]; then
		attended "$D" "$2" && continue
		state=ended
	elif [ ! -d /run/systemd/system ]; then
		kill -0 "$(cat "$D/pid")" 2>/dev/null && state=alive
	else
		# An empty answer is a manager that is being replaced.
		case $(systemctl is-active "tf-hosts-$name.service" 2>/dev/null) in inactive | failed | unknown) ;; *) state=alive ;; esac
	fi
	say record "$name $state $(cat "$D/phase" 2>/dev/null || echo none) $(cat "$D/action") $(cat "$D/new")"
done
say end yes
`

// rootScript keeps the wanted ($1) and the running system from the garbage
// collector, then prints which of the paths on stdin the host lacks. A plain link
// does, before the path is there; --add-root would not.
const rootScript = toolPath + `
R=/nix/var/nix/gcroots/tf-hosts
mkdir -p "$R" && ln -sfn "$1" "$R/new" || exit 1
[ ! -e /run/current-system ] || ln -sfn "$(readlink -f /run/current-system)" "$R/old" || exit 1
xargs -r -n 500 nix-store --check-validity --print-invalid
`

// substituteScript fetches those of the paths on stdin that the host's own
// substituters have.
const substituteScript = toolPath + `xargs -r -n 500 nix-store --realise --ignore-unknown --keep-going >/dev/null`

// receiveScript serves the host's store on its stdin and stdout. It leaves its
// pid, with the name $1 of the copy, for staleScript.
const receiveScript = toolPath + `
R=/run/tf-hosts/copy
mkdir -p "$R" && echo "$1" >"$R/$$"
for f in "$R"/*; do [ -d "/proc/${f##*/}" ] || rm -f "$f"; done
exec nix-daemon --stdio
`

// staleScript ends what a vanished deployer left: its daemon holds the lock of a
// path until the old TCP connection dies, a quarter of an hour later. $1 is the
// copy that waits; a daemon that reads anything within 10 s is alive. SIGTERM
// would free the lock and leave the process.
const staleScript = `
R=/run/tf-hosts/copy
read_so_far() { sed -n 's/^rchar: //p' "/proc/$1/io" 2>/dev/null; }
for f in "$R"/*; do
	pid=${f##*/}
	[ "$(cat "$f")" != "$1" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = nix-daemon ] || continue
	before=$(read_so_far "$pid")
	sleep 10
	[ "$(read_so_far "$pid")" = "$before" ] || continue
	kill -9 "$pid" && echo "$pid"
	rm -f "$f"
done
`

// deletePartialScript removes what a broken copy left of the paths on stdin:
// on a full disk it is what keeps the disk full.
const deletePartialScript = toolPath + `
rm -f /nix/var/nix/gcroots/tf-hosts/new
while read -r path; do
	[ -e "$path" ] || continue
	nix-store --check-validity "$path" 2>/dev/null || nix-store --delete "$path"
done
`

// presentScript is 0 when $1 is whole and a NixOS system, else it says why not.
const presentScript = toolPath + `
nix-store --check-validity "$1" || exit 3
[ -x "$1/bin/switch-to-configuration" ] || { echo "it has no bin/switch-to-configuration"; exit 4; }
[ -e "$1/nixos-version" ] || { echo "it has no nixos-version"; exit 4; }
`

// checkScript runs the pre-switch checks. It has no feature test: an older
// switch-to-configuration answers its usage, which the caller reads.
const checkScript = toolPath + `timeout -k 5 "$2" "$1/bin/switch-to-configuration" check </dev/null 2>&1`

// launch runs "activate.sh $2" on record $1 in a unit of its own, whose stdin and
// output are not ours. The unit's limits are the last resort: the switch, the
// guard, "boot" and the way back of two more switches.
const launch = `
launch() {
	limit=$(cat "$D/limit") guard=$(cat "$D/guard") wait=$(cat "$D/wait")
	if [ ! -d /run/systemd/system ]; then
		setsid /bin/sh "$D/activate.sh" "$2" "$D" >>"$D/log" 2>&1 </dev/null &
		return
	fi
	systemd-run --quiet --collect --unit="tf-hosts-$1.service" --service-type=exec \
		--description="tf-hosts: activation $1" \
		-p StandardInput=null -p "StandardOutput=append:$D/log" -p StandardError=inherit \
		-p KillSignal=SIGKILL -p TimeoutStopSec=$((3 * limit + 120)) \
		-p RuntimeMaxSec=$((4 * limit + guard + wait + 120)) \
		-p "ExecStopPost=/bin/sh $D/activate.sh settle $D" \
		/bin/sh "$D/activate.sh" "$2" "$D"
}
`

// startScript starts the unit of a record; $1 is the record's name, then the
// system, the action, the limit of a switch in seconds, the policies for failed
// units and for inhibitors, the seconds of the guard (0: none), the seconds to
// wait for the lock, and who waits. stdin is activate.sh. It may be repeated when
// its answer was lost.
const startScript = toolPath + launch + `
B=/var/lib/tf-hosts/runs D=$B/$1
[ -e "$D/used" ] && exit 0
# Twice: another run may remove the folder above when it is empty.
mkdir -p "$D" 2>/dev/null || mkdir -p "$D" && chmod 700 "$B" || exit 1
# What never started says nothing.
for other in "$B"/*; do
	[ -e "$other/used" ] || find "$other" -maxdepth 0 -mmin +60 -exec rm -rf {} +
done
cat >"$D/activate.sh.tmp" && mv "$D/activate.sh.tmp" "$D/activate.sh" || exit 1
put() { printf '%s\n' "$2" >"$D/$1" || exit 1; }
put new "$2"; put action "$3"; put limit "$4"; put policy "$5"; put inhibitor "$6"
put guard "$7"; put wait "$8"; put who "$9"
launch "$1" run || [ -e "$D/used" ]
`

// settleScript has the record $1, whose unit is gone without a verdict, settled
// by a new one. It is 75 while the host is shutting down.
const settleScript = toolPath + launch + `
D=/var/lib/tf-hosts/runs/$1
[ "$(systemctl is-system-running 2>/dev/null)" = stopping ] && exit 75
launch "$1" settle
`

// decideScript asks for the decision $2, confirmed or expired, on record $1; $3
// says why. The first one asked for holds, and is printed.
const decideScript = `
D=/var/lib/tf-hosts/runs/$1
[ -d "$D" ] || { echo gone; exit; }
[ -z "$3" ] || printf '%s\n' "$3" >"$D/why"
ln -s "$2" "$D/decision" 2>/dev/null
readlink "$D/decision"
`

// waitScript waits up to $2 seconds for the verdict of record $1, or for its phase
// $4, then prints what there is, the log from line $3 on; $5 is who reads. The unit's state is asked for before
// the verdict is looked for: the other order can miss a verdict.
const waitScript = toolPath + `
D=/var/lib/tf-hosts/runs/$1 unit=tf-hosts-$1.service t=0
say() { printf '%s %s\n' "$1" "$2"; }
each() { [ -e "$D/$2" ] && sed "s/^/$1 /" "$D/$2"; }
alive() {
	if [ -d /run/systemd/system ]; then
		# An empty answer is a manager that is being replaced.
		case $(systemctl is-active "$unit" 2>/dev/null) in inactive | failed | unknown) return 1 ;; esac
	elif [ -e "$D/pid" ]; then
		kill -0 "$(cat "$D/pid")" 2>/dev/null
	fi
}
while :; do
	if [ -d "$D" ]; then
		mkdir -p "$D/readers"
		read -r now _ </proc/uptime
		echo "${now%.*}" >"$D/readers/$5"
	fi
	if alive; then state=alive; else state=gone; fi
	[ -e "$D/verdict" ] && state=ended
	[ "$state" = alive ] && [ "$t" -lt $(($2 * 4)) ] || break
	[ -n "$4" ] && [ "$(cat "$D/phase" 2>/dev/null)" = "$4" ] && break
	sleep 0.25
	t=$((t + 1))
done
[ -d "$D" ] || state=none
say state "$state"
[ ! -e "$D/phase" ] || say phase "$(cat "$D/phase")"
[ ! -e "$D/old" ] || say old "$(cat "$D/old")"
[ ! -e "$D/code" ] || say code "$(cat "$D/code")"
if [ "$state" = ended ]; then
	say verdict "$(cat "$D/verdict")"
	each new "failed_new"
	each journal "journal"
	each before "failed_before"
fi
if [ -e "$D/log" ]; then
	n=$(wc -l <"$D/log")
	[ "$state" = alive ] || n='$'
	[ "$n" = 0 ] || sed -n "$(($3 + 1)),${n}s/^/log /p" "$D/log"
fi
say end yes
`

// releaseScript removes the record $1 that the deployer $3 has read, unless another
// one still reads it; its log is kept until the next one. After a success ($2 is
// yes) the profile roots the new system; the old one stays rooted for a way back.
// What nobody reads any more of earlier runs is printed and removed.
const releaseScript = attended + `
L=/var/log/tf-hosts
if [ -n "$1" ]; then
	rm -f "$B/$1/readers/$3"
	if [ ! -d "$B/$1" ]; then
		:
	elif attended "$B/$1" "$3"; then
		touch "$B/$1/read"
	else
		mkdir -p "$L" && mv -f "$B/$1/log" "$L/activation.log"
		rm -rf "${B:?}/$1"
	fi
fi
for D in "$B"/*; do
	[ -e "$D/verdict" ] && [ "$D" != "$B/$1" ] && ! attended "$D" "$3" || continue
	[ -e "$D/read" ] || printf 'left %s: %s\n' "$(cat "$D/who")" "$(cat "$D/verdict")"
	rm -rf "$D"
done
rmdir "$B" "${B%/*}" 2>/dev/null
[ "$2" != yes ] || rm -f /nix/var/nix/gcroots/tf-hosts/new
`

// journalScript prints the last journal lines of each unit.
const journalScript = toolPath + `
for unit; do
	journalctl --unit="$unit" --boot --lines=10 --no-pager --output=cat 2>/dev/null | sed "s/^/$unit: /"
done
`

// realiseScript builds the derivation $1 on the host.
const realiseScript = toolPath + `nix-store --realise "$1" >/dev/null`
