#!/bin/bash
# Simulates N hosts on one machine, for tests/end_to_end/support/simulated_hosts.rs. Each host has network, PID, mount,
# UTS and IPC namespaces, an IP address on a private bridge, a root file system (an overlay on / with a
# tmpfs), a host key and a real sshd. Needs root, iproute2, util-linux and openssh-server, and iptables
# for blackhole and partition.
#
#   hosts.sh up [N]                      start N hosts (default 4); removes an old set with the same ID
#   hosts.sh down | status | wait
#   hosts.sh exec H COMMAND...           run a command on host H without ssh (nsenter)
#   hosts.sh cut|heal H                  take the network link down, or up again
#   hosts.sh blackhole|unblackhole H     drop every IP packet silently while the link stays up
#   hosts.sh partition H1 H2 | unpartition H1 H2
#   hosts.sh link H1 H2 NET              a second network between two hosts, NET.1 and NET.2, on the interface data0
#   hosts.sh network NET                 a second network of all hosts on the interface data0: NET.1, NET.2, …; or IPv6: NET1, …
#   hosts.sh isolate|rejoin H            drop every packet between H and this machine; hosts reach each other
#   hosts.sh crash H                     power off; peers notice nothing
#   hosts.sh halt H                      power off; peers get a TCP RST
#   hosts.sh boot H                      power on again; the disk is kept, /tmp is lost
#   hosts.sh freeze|thaw H               stop all processes; the kernel still acknowledges TCP
#   hosts.sh killproc H PATTERN [SIG]    pkill -f on host H
#   hosts.sh sshd-stop|sshd-start H      stop sshd, so that port 22 gives ECONNREFUSED
#   hosts.sh fill H [DIR] [LEAVE_KB] | unfill H [DIR]     fill a disk; default DIR /scratch (small tmpfs)
#   hosts.sh mem H BYTES|-1              memory limit of the host (cgroup v1), with real OOM kills
set -euo pipefail
umask 022                                # the hosts do not have the umask of the caller
ID=${HOSTS_ID:-tb}                       # at most 6 characters; sets with different IDs can coexist
PREFIX=${HOSTS_PREFIX:-h}                # hosts are h0, h1, …
NET=${HOSTS_NET:-10.77.0}                # /24 network: host i is NET.(i+1), the bridge is NET.254
DIR=${HOSTS_DIR:-${TMPDIR:-/tmp}/testbed/$ID}
SCRATCH_MB=${HOSTS_SCRATCH_MB:-64}       # size of the private /scratch
DISK_MB=${HOSTS_DISK_MB:-1024}           # size of the private writable layer
SHM_MB=${HOSTS_SHM_MB:-1024}
BIND=${HOSTS_BIND:-}                     # a further shared directory (bind mount, writable)
SSHD=${HOSTS_SSHD:-yes}                  # no: hosts without sshd
EXECUTABLES=${HOSTS_EXECUTABLES:-}       # the cache of launch's executables that all hosts share, as with a shared home directory
SETENV=${HOSTS_SETENV:-}                 # sshd's SetEnv, such as 'PATH=/opt/x/bin:/usr/bin:/bin'
BR=br$ID
NOWHERE=02:00:00:00:00:01                # an Ethernet address that no host has
SELF=$(readlink -f "$0")
die() { echo "hosts.sh: $*" >&2; exit 1; }
print_names() { # the names of the hosts, one per line
  cat "$DIR/names"
}
print_pid1() { # print_pid1 H: the pid of host H's PID 1 on this machine; fails if the host is down
  local p; p=$(cat "$DIR/$1/pid1" 2>/dev/null) && [ -d "/proc/$p" ] && echo "$p"
}
require_host() { # require_host H: exits if there is no host H
  [ -d "$DIR/$1" ] || die "no host $1"
}
run_in_host() { # run_in_host H COMMAND...: runs a command in the namespaces and cgroups of host H
  local h=$1; shift; local p; p=$(print_pid1 "$h") || die "$h is down"
  ( for c in $(print_cgroup_dirs "$h"); do echo "$BASHPID" > "$c/cgroup.procs"; done
    exec nsenter -t "$p" -n -m -u -i -p -r -w -- "$@" )
}
run_in_network() { # run_in_network H COMMAND...: runs a command in the network namespace of host H
  local h=$1; shift; ip netns exec "$ID-$h" "$@"
}
print_cgroup_dirs() { # print_cgroup_dirs H: the cgroup directories of host H, if cgroup v1 is writable
  local c; for c in memory freezer; do [ -d /sys/fs/cgroup/$c ] && [ -w /sys/fs/cgroup/$c/cgroup.procs ] && echo "/sys/fs/cgroup/$c/$ID-$1"; done; true
}

# ---- runs as PID 1 of a new host ---------------------------------------------------------------
init() { # init H: mounts the root file system of host H, and starts its sshd
  local h=$1 D=$DIR/$1 R=$DIR/$1/root
  mount --make-rprivate /
  # boot() mounts the tmpfs of the disk in the outer namespace, so it survives a crash
  mount -t overlay overlay -o "lowerdir=/,upperdir=$D/disk/up,workdir=$D/disk/work" "$R"
  mount -t proc proc "$R/proc"
  mount -t sysfs sysfs "$R/sys"
  [ -d /sys/fs/cgroup ] && mount --rbind /sys/fs/cgroup "$R/sys/fs/cgroup"
  mount --rbind /dev "$R/dev"; mount -t tmpfs -o size=${SHM_MB}m,mode=1777 shm "$R/dev/shm"
  mount -t tmpfs -o mode=755 run "$R/run"; mkdir -p "$R/run/sshd" "$R/run/lock" "$R/run/munge"
  mount -t tmpfs -o mode=1777 tmp "$R/tmp"                 # private /tmp, lost by a reboot
  mkdir -p "$R/scratch" "$R/shared"
  mount --bind "$D/scratch" "$R/scratch"                   # small private disk, kept by a reboot
  mount --bind "$DIR/shared" "$R/shared"                   # the shared file system
  if [ -n "$BIND" ]; then mkdir -p "$R$BIND"; mount --rbind "$BIND" "$R$BIND"; fi
  if [ -n "$EXECUTABLES" ]; then mkdir -p "$R/root/.cache/launch/bin"; mount --bind "$EXECUTABLES" "$R/root/.cache/launch/bin"; fi
  cd "$R"; mkdir -p .old; pivot_root . .old; cd /; umount -l /.old; rmdir /.old 2>/dev/null || true
  hostname "$h"
  cp "/shared/.boot/$h/"ssh_host_ed25519_key* /etc/ssh/; chmod 600 /etc/ssh/ssh_host_ed25519_key
  exec chroot . /bin/bash -c '
    cd /; unset OLDPWD
    { [ '"$SSHD"' = no ] || /usr/sbin/sshd -f /etc/ssh/sshd_config -E /var/log/sshd.log; } && echo ok > /shared/.boot/'"$h"'/ready
    trap : TERM INT
    while :; do sleep 86400 & wait; done' hostinit </dev/null >/dev/null 2>&1
}
boot() { # boot H: starts the namespaces of a host, whose network namespace exists already
  local h=$1 D=$DIR/$1 c up
  [ -z "$(print_pid1 "$h" || true)" ] || return 0
  mkdir -p "$D/root" "$D/disk" "$D/scratch"; rm -f "$DIR/shared/.boot/$h/ready"
  if ! mountpoint -q "$D/disk"; then
    mount -t tmpfs -o size=${DISK_MB}m,mode=755 "$ID-disk" "$D/disk"
    mount -t tmpfs -o size=${SCRATCH_MB}m,mode=1777 "$ID-scratch" "$D/scratch"
    up=$D/disk/up; mkdir -p "$up/etc/ssh" "$up/root" "$up/var/log" "$D/disk/work"
    cp "$DIR/etc_hosts" "$up/etc/hosts"; echo "$h" > "$up/etc/hostname"; : > "$up/etc/resolv.conf"
    sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf > "$up/etc/nsswitch.conf"     # without DNS, unknown names fail immediately
    mkdir -m 700 "$up/root/.cache"; mknod "$up/root/.cache/launch" c 0 0               # an overlay whiteout hides this machine's directory
    mkdir -m 700 "$up/root/.ssh"; cp "$DIR/id_ed25519" "$DIR/id_ed25519.pub" "$DIR/known_hosts" "$up/root/.ssh/"
    cp "$DIR/id_ed25519.pub" "$up/root/.ssh/authorized_keys"; chmod 700 "$up/root"
    printf 'StrictHostKeyChecking yes\nBatchMode yes\nKexAlgorithms curve25519-sha256\n' > "$up/root/.ssh/config"; chmod 600 "$up/root/.ssh/"*
    [ -n "${HOSTS_KEEP_BASHRC:-}" ] || : > "$up/root/.bashrc"    # bash sources it at every ssh command
    { echo "HostKey /etc/ssh/ssh_host_ed25519_key"; echo "PermitRootLogin prohibit-password"
      echo "PasswordAuthentication no"; echo "UsePAM no"; echo "UseDNS no"; echo "PidFile /run/sshd.pid"
      echo "AcceptEnv LANG LC_*"; echo "Subsystem sftp internal-sftp"; echo "PrintMotd no"
      [ -z "$SETENV" ] || echo "SetEnv $SETENV"; } > "$up/etc/ssh/sshd_config"
  fi
  ( for c in $(print_cgroup_dirs "$h"); do mkdir -p "$c"; echo "$BASHPID" > "$c/cgroup.procs"; done
    # a separate session without inherited descriptors, so that the host keeps no process of the caller alive
    exec setsid nsenter --net="/run/netns/$ID-$h" unshare --mount --uts --ipc --pid --fork \
      env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
      HOSTS_ID="$ID" HOSTS_DIR="$DIR" HOSTS_SHM_MB="$SHM_MB" HOSTS_BIND="$BIND" HOSTS_SSHD="$SSHD" HOSTS_EXECUTABLES="$EXECUTABLES" \
      bash "$SELF" __init "$h" </dev/null >"$D/init.log" 2>&1 9>&- ) &
  echo $! > "$D/outer"
}
wait_ready() { # wait_ready H...: waits for sshd on each host, and records the outer pid of its PID 1
  local h t p; t=$((SECONDS + ${WAIT:-30}))
  for h; do
    until p=$(cat "$DIR/$h/outer"); p=$(cat "/proc/$p/task/$p/children" 2>/dev/null); [ -n "$p" ] && [ -e "$DIR/shared/.boot/$h/ready" ]; do
      [ $SECONDS -lt $t ] || { cat "$DIR/$h/init.log" >&2; die "$h did not come up"; }
      sleep 0.02
    done
    echo "${p% }" > "$DIR/$h/pid1"
  done
}
up() { # up [N]: creates and starts N hosts
  local n=${1:-4} i h
  [ "$n" -le 250 ] || die "$n hosts; at most 250 are supported"
  [ -n "$(command -v sshd || ls /usr/sbin/sshd 2>/dev/null)" ] || die "sshd is not installed (apt-get install openssh-server)"
  down
  mkdir -p "$DIR/shared/.boot" "$DIR/keys" /run/netns
  [ -f "$DIR/id_ed25519" ] || ssh-keygen -q -t ed25519 -N '' -C "$ID-test" -f "$DIR/id_ed25519"
  : > "$DIR/names"; : > "$DIR/known_hosts"; printf '127.0.0.1 localhost\n%s.254 %s-head\n' "$NET" "$ID" > "$DIR/etc_hosts"; : > "$DIR/ssh_config"
  local batch=""
  for ((i=0;i<n;i++)); do h=$PREFIX$i; ip=$NET.$((i+1))
    echo "$h" >> "$DIR/names"; mkdir -p "$DIR/$h" "$DIR/shared/.boot/$h"; echo "$ip" > "$DIR/$h/ip"
    [ -f "$DIR/keys/$h" ] || ssh-keygen -q -t ed25519 -N '' -C "$h" -f "$DIR/keys/$h"   # kept for the next `up`
    cp "$DIR/keys/$h" "$DIR/shared/.boot/$h/ssh_host_ed25519_key"; cp "$DIR/keys/$h.pub" "$DIR/shared/.boot/$h/ssh_host_ed25519_key.pub"
    read -r kt kb _ < "$DIR/keys/$h.pub"
    echo "$h,$ip $kt $kb" >> "$DIR/known_hosts"; echo "$ip $h $h.$ID.test" >> "$DIR/etc_hosts"
    printf 'Host %s\n  HostName %s\n  HostKeyAlias %s\n' "$h" "$ip" "$h" >> "$DIR/ssh_config"
  done
  printf 'Host *\n  User root\n  IdentityFile %s\n  IdentitiesOnly yes\n  UserKnownHostsFile %s\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n  BatchMode yes\n  KexAlgorithms curve25519-sha256\n  LogLevel ERROR\n' "$DIR/id_ed25519" "$DIR/known_hosts" >> "$DIR/ssh_config"
  # one ip -batch for the network of all hosts
  { echo "link add $BR type bridge"; echo "addr add $NET.254/24 dev $BR"; echo "link set $BR up"
    i=0; while read -r h; do
      echo "netns add $ID-$h"; i=$((i+1)); done < "$DIR/names"; } | ip -batch -
  { while read -r h; do
      echo "link add v$ID$h type veth peer name eth0 netns $ID-$h"
      echo "link set v$ID$h master $BR up"; done < "$DIR/names"; } | ip -batch -
  while read -r h; do
    printf 'link set lo up\naddr add %s/24 dev eth0\nlink set eth0 up\nroute add default via %s.254\n' "$(cat "$DIR/$h/ip")" "$NET" | ip -n "$ID-$h" -batch -
  done < "$DIR/names"
  while read -r h; do boot "$h"; done < "$DIR/names"
  wait_ready $(print_names)
}
down() { # kills all processes of the hosts, and removes the hosts and their network
  local h p c
  [ -f "$DIR/names" ] || { network_down; return 0; }
  for h in $(print_names); do thaw_if_frozen "$h"; p=$(cat "$DIR/$h/pid1" 2>/dev/null || true)
    [ -z "$p" ] || { [ "$(readlink /proc/$p/ns/net 2>/dev/null)" != "$(readlink /proc/self/ns/net)" ] && kill -9 "$p" 2>/dev/null || true; }
  done
  for h in $(print_names); do p=$(cat "$DIR/$h/pid1" 2>/dev/null || true); [ -z "$p" ] || while [ -d /proc/$p/ns ] && [ -e /proc/$p/root/shared ] 2>/dev/null; do sleep 0.01; done; done
  network_down
  for h in $(print_names); do
    umount -l "$DIR/$h/disk" "$DIR/$h/scratch" 2>/dev/null || true
    for c in $(print_cgroup_dirs "$h"); do [ ! -d "$c" ] || rmdir "$c" 2>/dev/null || { sleep 0.1; rmdir "$c" 2>/dev/null || true; }; done
    rm -rf --one-file-system "${DIR:?}/$h"
  done
  rm -rf --one-file-system "$DIR/shared" "$DIR/names"
}
network_down() { # removes the network namespaces, links and bridge of this set of hosts
  local n
  { for n in $(ls /run/netns 2>/dev/null | grep "^$ID-$PREFIX[0-9]*$"); do echo "netns del $n"; done; } | ip -force -batch - 2>/dev/null || true
  ip link del "$BR" 2>/dev/null || true; ip link del "d$BR" 2>/dev/null || true
  for n in $(ls /sys/class/net | grep -E "^(v|t|b|x)$ID$PREFIX[0-9]+$"); do ip link del "$n" 2>/dev/null || true; done
}
thaw_if_frozen() { # thaw_if_frozen H
  local f=/sys/fs/cgroup/freezer/$ID-$1/freezer.state; [ ! -f "$f" ] || echo THAWED > "$f"
}
run_iptables() { # run_iptables H ARGUMENTS...: runs iptables on host H
  local h=$1; shift; run_in_network "$h" iptables -w "$@"
}
cmd=${1:-}; shift || true
case $cmd in
  __init) init "$@";;
  up|down) mkdir -p "$(dirname "$DIR")"; exec 9>"$(dirname "$DIR")/.$ID.lock"; flock -w 60 9; $cmd "$@";;
  wait) wait_ready $(print_names);;
  names) print_names;;
  ip) require_host "$1"; cat "$DIR/$1/ip";;
  pid) print_pid1 "$1";;
  status) [ -f "$DIR/names" ] || { echo "down"; exit 0; }
    for h in $(print_names); do p=$(print_pid1 "$h" || true); echo "$h $(cat "$DIR/$h/ip") $([ -n "$p" ] && echo "up pid1=$p" || echo CRASHED)"; done;;
  exec) run_in_host "$@";;
  netexec) run_in_network "$@";;
  cut) require_host "$1"; ip link set "v$ID$1" down;;
  heal) require_host "$1"; ip link set "v$ID$1" up;;
  blackhole) run_iptables "$1" -I INPUT ! -i lo -j DROP; run_iptables "$1" -I OUTPUT ! -o lo -j DROP;;
  unblackhole) run_iptables "$1" -D INPUT ! -i lo -j DROP || true; run_iptables "$1" -D OUTPUT ! -o lo -j DROP || true;;
  partition) run_iptables "$1" -I INPUT -s "$(cat "$DIR/$2/ip")" -j DROP; run_iptables "$1" -I OUTPUT -d "$(cat "$DIR/$2/ip")" -j DROP;;
  unpartition) run_iptables "$1" -D INPUT -s "$(cat "$DIR/$2/ip")" -j DROP; run_iptables "$1" -D OUTPUT -d "$(cat "$DIR/$2/ip")" -j DROP;;
  link) require_host "$1"; require_host "$2"; ip link add data0 netns "$ID-$1" type veth peer name data0 netns "$ID-$2"
      i=0; for h in "$1" "$2"; do i=$((i+1)); printf 'addr add %s/24 dev data0\nlink set data0 up\n' "$3.$i" | ip -n "$ID-$h" -batch -; done;;
  network) ip link add "d$BR" type bridge; ip link set "d$BR" up; i=0
      for h in $(print_names); do i=$((i+1)); case $1 in *:*) a="$1$i/64 dev data0 nodad";; *) a="$1.$i/24 dev data0";; esac
        ip link add "x$ID$h" type veth peer name data0 netns "$ID-$h"; ip link set "x$ID$h" master "d$BR" up
        printf 'addr add %s\nlink set data0 up\n' "$a" | ip -n "$ID-$h" -batch -; done;;
  isolate) run_in_network "$1" ip neigh replace "$NET.254" lladdr "$NOWHERE" nud permanent dev eth0
      ip neigh replace "$(cat "$DIR/$1/ip")" lladdr "$NOWHERE" nud permanent dev "$BR";;
  rejoin) run_in_network "$1" ip neigh del "$NET.254" dev eth0; ip neigh del "$(cat "$DIR/$1/ip")" dev "$BR";;
  crash|halt) require_host "$1"; p=$(print_pid1 "$1") || exit 0; [ $cmd = halt ] || ip link set "v$ID$1" down   # after a halt, peers get RST
      kill -9 "$p"; while [ -e /proc/$p/root/shared ]; do sleep 0.01; done; rm -f "$DIR/$1/pid1";;
  boot) require_host "$1"; ip link set "v$ID$1" up; boot "$1"; wait_ready "$1";;
  freeze) echo FROZEN > "/sys/fs/cgroup/freezer/$ID-$1/freezer.state";;
  thaw) thaw_if_frozen "$1";;
  killproc) h=$1 pat=$2 sig=${3:-KILL}; run_in_host "$h" pkill "-$sig" -f "$pat";;
  sshd-stop) run_in_host "$1" sh -c 'kill $(cat /run/sshd.pid)';;
  sshd-start) run_in_host "$1" /usr/sbin/sshd -f /etc/ssh/sshd_config -E /var/log/sshd.log;;
  fill) d=${2:-/scratch}; run_in_host "$1" sh -c "a=\$(df -k --output=avail $d | tail -1); fallocate -l \$((a - ${3:-0}))k $d/.fill";;
  unfill) run_in_host "$1" rm -f "${2:-/scratch}/.fill";;
  mem) echo "$2" > "/sys/fs/cgroup/memory/$ID-$1/memory.limit_in_bytes";;
  *) sed -n 2,22p "$SELF"; exit 2;;
esac
