# Starts one host and becomes it. Runs in a mount namespace of its own, so that
# every mount made here goes when the host ends.
# $1 lower layers, $2 the host's folder, $3 its cgroup; the rest: nspawn's arguments.
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
if [ -d "$2/store" ]; then mount --bind "$2/store" "$2/root/nix/store"; fi
# systemd 257 refuses cgroup v1. Where the machine has the old or the mixed
# layout, the host sees version 2 alone all the same.
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p "/sys/fs/cgroup/$3"
echo $$ >"/sys/fs/cgroup/$3/cgroup.procs"
shift 3
exec systemd-nspawn "$@"
