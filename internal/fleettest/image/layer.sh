# Runs once, inside the base image: makes Debian look like a NixOS host.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
# What a boot of two seconds needs nothing of, or would differ from NixOS by.
for unit in console-getty.service getty.target apt-daily.timer apt-daily-upgrade.timer \
	dpkg-db-backup.timer ldconfig.service systemd-journal-catalog-update.service \
	systemd-update-done.service fstrim.timer e2scrub_all.timer; do
	ln -sfn /dev/null "/etc/systemd/system/$unit"
done
rm -f /etc/ssh/ssh_host_* /etc/machine-id
mkdir -p /var/log/journal
cat >/etc/ssh/sshd_config.d/10-tf-hosts.conf <<EOF
# VERBOSE has a line for each connection, which tests count.
LogLevel VERBOSE
EOF
# The drop-in of a host is merged into the line above by sshd: first value wins.

mkdir -p /etc/nix /nix/store /nix/var/nix/profiles /nix/var/nix/gcroots /nix/var/nix/daemon-socket /boot
chmod 1775 /nix/store
cat >/etc/nix/nix.conf <<EOF
build-users-group =
sandbox = false
substitute = false
substituters =
experimental-features = nix-command flakes
EOF
cat >/etc/systemd/system/nix-daemon.socket <<EOF
[Unit]
Description=Nix daemon socket
[Socket]
ListenStream=/nix/var/nix/daemon-socket/socket
[Install]
WantedBy=sockets.target
EOF
cat >/etc/systemd/system/nix-daemon.service <<EOF
[Unit]
Description=Nix daemon
Requires=nix-daemon.socket
[Service]
ExecStart=/usr/bin/nix-daemon --daemon
KillMode=process
EOF
mkdir -p /etc/systemd/system/sockets.target.wants
ln -sfn ../nix-daemon.socket /etc/systemd/system/sockets.target.wants/nix-daemon.socket

# The first program of a boot obeys the boot default, as a boot loader does.
cat >/sbin/tf-hosts-init <<'EOF'
#!/bin/sh
system=$(readlink -f /boot/default)
[ -x "$system/init" ] && exec "$system/init" "$@"
exec /usr/lib/systemd/systemd "$@"
EOF
chmod 755 /sbin/tf-hosts-init

touch /etc/NIXOS
system=$(NIX_REMOTE=local nix-build --no-out-link /usr/share/tf-hosts/base/plain.nix)
NIX_REMOTE=local nix-env -p /nix/var/nix/profiles/system --set "$system"
ln -sfn "$system" /boot/default
ln -sfn /run/current-system /nix/var/nix/gcroots/current-system
ln -sfn /run/booted-system /nix/var/nix/gcroots/booted-system
rm -rf /tmp/* /root/.cache /root/.nix-defexpr
