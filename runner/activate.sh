#!/bin/sh
# One activation of a NixOS system. It runs on the host in a unit of its own, so
# that it goes on when the deployer's connection ends.
#
# usage: activate.sh run RECORD | settle RECORD | settle-held RECORD REASON
#
# RECORD is a folder on disk: it must survive a reboot. Its files:
#   new action limit guard policy inhibitor wait who    what is wanted
#   used                                                a record is used once
#   pid old oldgen olddefault oldboot failed_before     what was found
#   phase                                               how far it came
#   code failed_new journal                             what the switch did
#   decision                                            confirmed or expired, once
#   why                                                 why the deployer asked to go back
#   verdict                                             the last word: WORD REASON
# The phases with a guard: test confirm set boot committed. Without: profile
# switch. On the way back: back, or back-boot where the boot default was touched.
set -u
verb=$1 D=$2 reason=${3-the unit ended: ${SERVICE_RESULT:-it was gone}}
P=/nix/var/nix/profiles/system
RUN=/run/tf-hosts
ROOTS=/nix/var/nix/gcroots/tf-hosts
# The tools of the system that runs now: the links change under the switch.
PATH=$(readlink -f /run/current-system 2>/dev/null)/sw/bin:/nix/var/nix/profiles/default/bin:${PATH-}:/usr/sbin:/usr/bin:/sbin:/bin
HOME=/root
export PATH HOME

get() { cat "$D/$1" 2>/dev/null; }

put() { # $1 = file, $2 = text; false when it is not on disk
	printf '%s\n' "$2" >"$D/$1.tmp" || return 1
	sync "$D/$1.tmp" 2>/dev/null || sync
	mv "$D/$1.tmp" "$D/$1"
}

cur() { [ -e /run/current-system ] && readlink -f /run/current-system; }

profile() { [ -e "$P" ] && readlink -f "$P"; }

same_boot() { [ "$(get oldboot)" = "$(cat /proc/sys/kernel/random/boot_id)" ]; }

# The clock that no switch moves.
uptime() {
	read -r up _ </proc/uptime
	echo "${up%.*}"
}

# What the boot loader would start, where it says so in plain text.
boot_default() {
	entry=$(sed -n 's/^default[[:space:]]*//p' /boot/loader/loader.conf 2>/dev/null | head -n 1)
	for f in "/boot/loader/entries/$entry" "/boot/loader/entries/$entry.conf" /boot/grub/grub.cfg; do
		[ -f "$f" ] || continue
		sed -n 's|.*init=\(/nix/store/[^/]*\)/init.*|\1|p' "$f" | head -n 1
		return
	done
}

failed() {
	systemctl list-units --state=failed --plain --no-legend --no-pager --full 2>/dev/null |
		while read -r unit _; do echo "$unit"; done
}

# Nothing of ours is inherited: a service that the switch leaves behind must not
# hold the lock.
stc() { # $1 = system, $2 = action
	timeout -k 5 "$(get limit)" "$1/bin/switch-to-configuration" "$2" </dev/null 9>&-
}

ended() { # $1 = what, $2 = its exit code; BusyBox's timeout says 143
	case $2 in
	124 | 137 | 143) echo "$1 did not end within $(get limit) s" ;;
	*) echo "$1 exited $2" ;;
	esac
}

lock() { # $1 = seconds; i is how many it took
	mkdir -p "$RUN"
	exec 9>>"$RUN/lock"
	i=0
	until flock -n 9; do
		[ "$i" -ge "$1" ] && return 1
		sleep 1
		i=$((i + 1))
	done
}

restore_profile() {
	g=$(get oldgen)
	[ "$(readlink "$P")" = "$g" ] && return
	case $g in
	'') rm -f "$P" ;;
	system-*-link)
		g=${g#system-}
		nix-env -p "$P" --switch-generation "${g%-link}"
		;;
	*) ln -sfn "$g" "$P.tf-hosts" && mv -T "$P.tf-hosts" "$P" ;;
	esac
}

# On a full boot partition the old default is still the default, though nothing
# can be written.
restore_default() {
	system=$(get olddefault)
	[ -n "$system" ] || return
	stc "$system" boot || [ "$(boot_default)" = "$system" ]
}

# A killed switch leaves lists of the units that it had still to start; the old
# system would start those of the new one.
drop_unknown_units() { # $1 = system
	for list in /run/nixos/start-list /run/nixos/restart-list /run/nixos/reload-list; do
		[ -s "$list" ] || continue
		while read -r unit; do
			template=$unit
			case $unit in *@*) template=${unit%%@*}@.${unit##*.} ;; esac
			if [ -e "$1/etc/systemd/system/$unit" ] || [ -e "$1/etc/systemd/system/$template" ]; then
				echo "$unit"
			fi
		done <"$list" >"$list.tf-hosts"
		mv "$list.tf-hosts" "$list"
	done
}

restore_running() { # $1 = system
	[ -n "$1" ] || return
	# After a reboot the host came up on its old default, whole.
	same_boot || [ "$(cur)" != "$1" ] || return 0
	drop_unknown_units "$1"
	stc "$1" test
	case $? in 0 | 4) ;; *) return 1 ;; esac
}

# back restores what ran, the profile and the boot default, each as it was
# recorded.
back() { # $1 = why
	ln -s expired "$D/decision" 2>/dev/null
	old=$(get old) ok=yes
	case $(get phase) in
	boot | switch | back-boot) put phase back-boot ;;
	*) put phase back ;;
	esac
	restore_profile || ok=
	if [ "$(get phase)" = back-boot ]; then restore_default || ok=; fi
	if [ "$(get action)" != boot ]; then restore_running "$old" || ok=; fi
	[ "$(cur)" = "$old" ] && [ "$(readlink "$P")" = "$(get oldgen)" ] || ok=
	if [ -n "$ok" ]; then put verdict "rolled_back $1"; else put verdict "rollback_failed $1"; fi
}

# commit makes the new system, which runs, the one that boots, unless it was only
# to be tested. It may be repeated.
commit() {
	if [ "$(get action)" = test ]; then
		put phase committed && return
		reason="the record could not be written"
		return 1
	fi
	put phase set || { reason="the record could not be written"; return 1; }
	nix-env -p "$P" --set "$new" || { reason="the profile could not be set"; return 1; }
	put phase boot || { reason="the record could not be written"; return 1; }
	stc "$new" boot
	code=$?
	[ "$code" = 0 ] || { reason=$(ended "making it the boot default" "$code"); return 1; }
	put phase committed
}

# praise is the verdict of a system that stays.
praise() {
	case $(get code) in
	4)
		if [ -s "$D/failed_new" ]; then
			put verdict degraded
		else
			put verdict "deployed with units that had failed before"
		fi
		;;
	100) put verdict "reboot_pending the init interface changed (exit 100)" ;;
	*) put verdict deployed ;;
	esac
}

# settle ends a record that its own process left without a verdict. The lock is held.
settle() { # $1 = why
	[ -e "$D/verdict" ] && return
	new=$(get new)
	if [ ! -e "$D/phase" ]; then
		put verdict "not_started $1"
		return
	fi
	case $(get phase) in
	committed)
		praise
		return
		;;
	set | boot)
		# It was confirmed, or nothing was activated.
		if { [ "$(cur)" = "$new" ] || [ "$(get code)" = 100 ]; } && commit; then
			praise
			return
		fi
		;;
	esac
	if ! same_boot && [ "$(cur)" = "$new" ] && [ "$(profile)" = "$new" ]; then
		put verdict "deployed by a reboot"
	else
		back "$1"
	fi
}

new_failures() {
	failed >"$D/failed_after"
	grep -vxF -f "$D/failed_before" "$D/failed_after" >"$D/failed_new"
	while read -r unit; do
		journalctl --unit="$unit" --boot --lines=10 --no-pager --output=cat 2>/dev/null | sed "s/^/$unit: /"
	done <"$D/failed_new" >"$D/journal"
	[ -s "$D/failed_new" ]
}

# observe records the running system, the profile and the boot default, each by
# itself: they may differ.
observe() {
	failed >"$D/failed_before"
	old=$(cur) default=$(boot_default)
	[ -n "$default" ] || default=$(profile)
	# The one that was rooted before the copy may have run no longer when the lock came.
	[ -z "$old" ] || ln -sfn "$old" "$ROOTS/old" || return
	put old "$old" && put oldgen "$(readlink "$P")" && put olddefault "${default:-$old}" &&
		put oldboot "$(cat /proc/sys/kernel/random/boot_id)"
}

switch_failed() { # $1 = exit code
	if grep -q 'Could not acquire lock' "$D/log" 2>/dev/null && [ "$(cur)" = "$(get old)" ]; then
		if restore_profile; then
			put verdict "locked another switch-to-configuration"
			return
		fi
	fi
	back "$(ended "the switch" "$1")"
}

# plain is the form without a guard.
plain() {
	put phase profile || { put verdict "not_started the record could not be written"; return; }
	nix-env -p "$P" --set "$new" || { back "the profile could not be set"; return; }
	put phase switch || { back "the record could not be written"; return; }
	stc "$new" "$(get action)"
	code=$?
	put code "$code"
	case $code in
	0) praise ;;
	4)
		if new_failures && [ "$(get policy)" = rollback ]; then back "units failed"; else praise; fi
		;;
	100)
		# Nothing was activated.
		if [ "$(get inhibitor)" = boot ]; then
			if commit; then praise; else back "$reason"; fi
		elif restore_profile && restore_default; then
			put verdict init_changed
		else
			put verdict "rollback_failed the init interface changed"
		fi
		;;
	*) switch_failed "$code" ;;
	esac
}

guarded() {
	put phase test || { put verdict "not_started the record could not be written"; return; }
	stc "$new" test
	code=$?
	put code "$code"
	case $code in
	0) ;;
	4)
		if new_failures && [ "$(get policy)" = rollback ]; then
			back "units failed"
			return
		fi
		;;
	100)
		# Nothing was activated.
		if [ "$(get inhibitor)" != boot ]; then
			put verdict init_changed
		elif commit; then
			praise
		else
			back "$reason"
		fi
		return
		;;
	*)
		switch_failed "$code"
		return
		;;
	esac
	if [ "$(get guard)" = 0 ]; then
		# A test that nobody has to confirm.
		if commit; then praise; else back "$reason"; fi
		return
	fi
	put phase confirm || { back "the record could not be written"; return; }
	end=$(($(uptime) + $(get guard)))
	until [ -h "$D/decision" ] || [ "$(uptime)" -ge "$end" ]; do sleep 0.2; done
	# Whoever links first has decided.
	ln -s expired "$D/decision" 2>/dev/null
	if [ "$(readlink "$D/decision")" != confirmed ]; then
		reason=$(get why)
		back "${reason:-no confirmation came within $(get guard) s}"
	elif commit; then
		praise
	else
		back "$reason"
	fi
}

# Another run brought the host to the same system while this one waited: the one
# that a deployer started before it was killed. A second switch would restart what
# the first one started.
done_meanwhile() {
	[ "$i" -gt 0 ] && [ "$(get action)" = switch ] && [ -z "$(failed)" ] &&
		[ "$(cur)" = "$(get new)" ] && [ "$(profile)" = "$(get new)" ]
}

case $verb in
run)
	mkdir "$D/used" 2>/dev/null || exit 0
	put pid "$$"
	command -v flock >/dev/null || { put verdict "not_started the host has no flock"; exit 0; }
	lock "$(get wait)" || { put verdict "locked $(cat "$RUN/holder" 2>/dev/null)"; exit 0; }
	get who >"$RUN/holder"
	for other in "${D%/*}"/*/phase; do
		other=${other%/phase}
		[ "$other" = "$D" ] || [ -e "$other/verdict" ] || [ ! -d "$other" ] ||
			/bin/sh "$0" settle-held "$other" "the activation was interrupted"
	done
	if done_meanwhile; then
		put verdict "deployed by another run"
		exit 0
	fi
	new=$(get new)
	if ! observe; then
		put verdict "not_started the record could not be written"
	elif [ "$(get guard)" -gt 0 ] || [ "$(get action)" = test ]; then
		guarded
	else
		plain
	fi
	;;
settle)
	[ -e "$D/verdict" ] && exit 0
	[ "$(systemctl is-system-running 2>/dev/null)" = stopping ] && exit 0
	lock 600 && settle "$reason"
	;;
settle-held) settle "$reason" ;;
esac
