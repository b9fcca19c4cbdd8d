#!/bin/sh
# One activation of a NixOS system. It runs on the host in a unit of its own, so
# that it goes on when the deployer's connection ends.
#
# usage: activate.sh run RECORD | settle RECORD | settle-held RECORD REASON
#
# RECORD is a folder on disk: it must survive a reboot. Its files:
#   new action limit policy wait who        what is wanted, written before the start
#   used                                    a record is used once
#   pid old oldgen oldboot failed_before    what was found
#   phase                                   set, switch, back
#   code failed_new journal                 what the switch did
#   verdict                                 the last word: WORD REASON
set -u
verb=$1 D=$2 reason=${3-the unit ended: ${SERVICE_RESULT:-it was gone}}
P=/nix/var/nix/profiles/system
RUN=/run/tf-hosts
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

same_boot() { [ "$(get oldboot)" = "$(cat /proc/sys/kernel/random/boot_id)" ]; }

failed() {
	systemctl list-units --state=failed --plain --no-legend --no-pager --full 2>/dev/null |
		while read -r unit _; do echo "$unit"; done
}

# Nothing of ours is inherited: a service that the switch leaves behind must not
# hold the lock.
stc() { # $1 = system, $2 = action
	timeout -k 5 "$(get limit)" "$1/bin/switch-to-configuration" "$2" </dev/null 9>&-
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

# The boot default belongs to the profile, not to what ran.
restore_default() {
	system=$(get old)
	[ -e "$P" ] && system=$(readlink -f "$P")
	[ -n "$system" ] && stc "$system" boot
}

back() { # $1 = why
	phase=$(get phase) old=$(get old) ok=yes
	put phase back
	restore_profile || ok=
	if [ "$phase" != set ]; then
		restore_default || ok=
		if [ "$(get action)" != boot ]; then
			if [ -n "$old" ]; then
				stc "$old" test
				case $? in 0 | 4) ;; *) ok= ;; esac
			else
				ok=
			fi
		fi
	fi
	[ "$(cur)" = "$old" ] && [ "$(readlink "$P")" = "$(get oldgen)" ] || ok=
	if [ -n "$ok" ]; then put verdict "rolled_back $1"; else put verdict "rollback_failed $1"; fi
}

# settle ends a record that its own process left without a verdict. The lock is held.
settle() { # $1 = why
	[ -e "$D/verdict" ] && return
	new=$(get new)
	if [ ! -e "$D/phase" ]; then
		put verdict "not_started $1"
	elif ! same_boot && [ "$(cur)" = "$new" ] && [ "$(readlink -f "$P")" = "$new" ]; then
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

activate() {
	new=$(get new)
	failed >"$D/failed_before"
	if ! { put old "$(cur)" && put oldgen "$(readlink "$P")" &&
		put oldboot "$(cat /proc/sys/kernel/random/boot_id)" && put phase set; }; then
		put verdict "not_started the record could not be written"
		return
	fi
	nix-env -p "$P" --set "$new" || { back "the profile could not be set"; return; }
	put phase switch || { back "the record could not be written"; return; }
	stc "$new" "$(get action)"
	code=$?
	put code "$code"
	case $code in
	0) put verdict deployed ;;
	4)
		if ! new_failures; then
			put verdict "deployed with units that had failed before"
		elif [ "$(get policy)" = rollback ]; then
			back "units failed"
		else
			put verdict degraded
		fi
		;;
	100)
		# Nothing was activated: the init interface changed.
		if restore_profile && restore_default; then
			put verdict "init_changed"
		else
			put verdict "rollback_failed the init interface changed"
		fi
		;;
	*)
		if grep -q 'Could not acquire lock' "$D/log" 2>/dev/null && [ "$(cur)" = "$(get old)" ]; then
			if restore_profile; then
				put verdict "locked another switch-to-configuration"
				return
			fi
		fi
		case $code in
		124 | 137) back "the switch did not end within $(get limit) s" ;;
		*) back "the switch exited $code" ;;
		esac
		;;
	esac
}

# Another run brought the host to the same system while this one waited: the one
# that a deployer started before it was killed. A second switch would restart what
# the first one started.
done_meanwhile() {
	[ "$i" -gt 0 ] && [ "$(get action)" = switch ] && [ -z "$(failed)" ] &&
		[ "$(cur)" = "$(get new)" ] && [ "$(readlink -f "$P")" = "$(get new)" ]
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
	activate
	;;
settle)
	[ -e "$D/verdict" ] && exit 0
	[ "$(systemctl is-system-running 2>/dev/null)" = stopping ] && exit 0
	lock 600 && settle "$reason"
	;;
settle-held) settle "$reason" ;;
esac
