//! [`HostCounters`]: the kernel's counters of the CPUs, memory, disks and network of this host.
use protocol::control::HostUsage;
use std::{fs, path::Path};

/// The size in bytes of the sectors that `/proc/diskstats` counts, which is equal for all disks.
const SECTOR_BYTES: u64 = 512;
/// The indices of the two columns of `/proc/stat` that count idle CPU time: idle, and idle while
/// waiting for disks.
const IDLE_COLUMNS: [usize; 2] = [3, 4];
/// The number of leading columns in the `cpu` line of `/proc/stat` whose sum is the total CPU time
/// of the host. Later columns are parts of them.
const CPU_COLUMN_COUNT: usize = 8;
/// The prefixes of the names of disks that are not counted, because they are in memory or store
/// their data on another disk.
const VIRTUAL_DISK_PREFIXES: [&str; 5] = ["loop", "ram", "zram", "dm-", "md"];

/// The counts of a host's CPU time and of its disk and network traffic since it was booted, and its
/// present memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct HostCounters {
    cpus: u32,
    /// The time of all CPUs, and the part in which they were busy, in clock ticks.
    ticks: u64,
    busy_ticks: u64,
    memory_total: u64,
    memory_available: u64,
    disk_read: u64,
    disk_written: u64,
    network_received: u64,
    network_sent: u64,
    retransmitted_segments: u64,
}

impl HostCounters {
    /// Reads the counters of the host's CPUs, memory, disks and network from the kernel's `proc`
    /// file system below the directory `root`. A counter that cannot be read is 0.
    pub(super) fn read(root: &Path) -> HostCounters {
        let read = |file: &str| fs::read_to_string(root.join("proc").join(file)).unwrap_or_default();
        let mut counters = HostCounters::default();
        counters.parse_stat(&read("stat"));
        counters.parse_meminfo(&read("meminfo"));
        counters.parse_diskstats(&read("diskstats"));
        counters.parse_net_dev(&read("net/dev"));
        counters.parse_snmp(&read("net/snmp"));
        counters
    }

    /// Computes the usage of the host's CPUs, disks and network in the time between the counters
    /// `before` and these counters.
    pub(super) fn compute_usage_since(&self, before: &HostCounters) -> HostUsage {
        let ticks = self.ticks.saturating_sub(before.ticks);
        let busy = self.busy_ticks.saturating_sub(before.busy_ticks);
        HostUsage {
            cpus: self.cpus,
            cpu_share: if ticks == 0 { 0.0 } else { (busy as f64 / ticks as f64).min(1.0) },
            memory_total: self.memory_total,
            memory_used: self.memory_total.saturating_sub(self.memory_available),
            disk_read: self.disk_read.saturating_sub(before.disk_read),
            disk_written: self.disk_written.saturating_sub(before.disk_written),
            network_received: self.network_received.saturating_sub(before.network_received),
            network_sent: self.network_sent.saturating_sub(before.network_sent),
            retransmitted_segments: self.retransmitted_segments.saturating_sub(before.retransmitted_segments),
            ..HostUsage::default()
        }
    }

    /// Reads the number of CPUs and their total and busy time from the content of `/proc/stat`.
    fn parse_stat(&mut self, text: &str) {
        self.cpus =
            text.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count() as u32;
        let Some(line) = text.lines().find_map(|line| line.strip_prefix("cpu ")) else { return };
        let columns = parse_numbers(line);
        let columns = &columns[..columns.len().min(CPU_COLUMN_COUNT)];
        self.ticks = sum(columns.iter().copied());
        let idle = sum(IDLE_COLUMNS.iter().filter_map(|column| columns.get(*column).copied()));
        self.busy_ticks = self.ticks.saturating_sub(idle);
    }

    /// Reads the total and the available memory from the content of `/proc/meminfo`.
    fn parse_meminfo(&mut self, text: &str) {
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.split_whitespace().next()?.parse::<u64>().ok()?.saturating_mul(1024))
        };
        self.memory_total = value("MemTotal:").unwrap_or(0);
        self.memory_available = value("MemAvailable:").unwrap_or(self.memory_total);
    }

    /// Counts the bytes that were read from and written to disks, without partitions and virtual
    /// disks, from the content of `/proc/diskstats`. The lines of partitions follow that of their
    /// disk.
    fn parse_diskstats(&mut self, text: &str) {
        let mut disk = "";
        for line in text.lines() {
            let mut fields = line.split_whitespace().skip(2);
            let Some(name) = fields.next() else { continue };
            let is_partition = !disk.is_empty() && name.starts_with(disk);
            if is_partition || VIRTUAL_DISK_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
                continue;
            }
            disk = name;
            let columns: Vec<u64> = fields.map_while(|field| field.parse().ok()).collect();
            let bytes = |column: usize| columns.get(column).map_or(0, |n| n.saturating_mul(SECTOR_BYTES));
            self.disk_read = self.disk_read.saturating_add(bytes(2));
            self.disk_written = self.disk_written.saturating_add(bytes(6));
        }
    }

    /// Counts the bytes that all network interfaces except the loopback interface have received and
    /// sent, from the content of `/proc/net/dev`.
    fn parse_net_dev(&mut self, text: &str) {
        for (name, columns) in text.lines().filter_map(|line| line.split_once(':')) {
            if name.trim() == "lo" {
                continue;
            }
            let columns = parse_numbers(columns);
            let column = |at: usize| columns.get(at).copied().unwrap_or(0);
            self.network_received = self.network_received.saturating_add(column(0));
            self.network_sent = self.network_sent.saturating_add(column(8));
        }
    }

    /// Reads the number of TCP segments that were retransmitted from the content of
    /// `/proc/net/snmp`. The first line of a protocol has the names of the columns, the second one
    /// the values.
    fn parse_snmp(&mut self, text: &str) {
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
        let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return };
        let at = names.split_whitespace().position(|name| name == "RetransSegs");
        let value = at.and_then(|at| values.split_whitespace().nth(at)?.parse().ok());
        self.retransmitted_segments = value.unwrap_or(0);
    }
}

fn parse_numbers(line: &str) -> Vec<u64> {
    line.split_whitespace().map_while(|field| field.parse().ok()).collect()
}

fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_the_kernel_are_read() {
        let root = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            let path = root.path().join("proc").join(name);
            fs::create_dir_all(path.parent().expect("parent")).expect("directory");
            fs::write(path, text).expect("file");
        };
        write(
            "stat",
            "cpu  100 0 50 800 50 0 0 0 7 0\ncpu0 50 0 25 400 25 0 0 0\ncpu1 50 0 25 400 25 0 0 0\n",
        );
        write("meminfo", "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\n");
        write(
            "diskstats",
            " 8 0 sda 10 0 100 5 20 0 200 9 0\n 8 1 sda1 10 0 100 5 20 0 200 9 0\n 7 0 loop0 1 0 9 0 0 0 0 0\n \
             259 0 nvme0n1 1 0 3 0 1 0 4 0\n 259 1 nvme0n1p1 1 0 3 0 1 0 4 0\n",
        );
        write(
            "net/dev",
            "Inter-| Receive\n face |bytes\n    lo: 99 1 0 0 0 0 0 0 99 1 0 0 0 0 0 0\n  eth0: 1000 1 0 0 0 0 0 0 500 1 0 0 0 0 0 0\n",
        );
        write("net/snmp", "Ip: A\nIp: 1\nTcp: RtoAlgorithm RetransSegs InErrs\nTcp: 1 42 0\n");
        let before = HostCounters::read(root.path());
        assert_eq!((before.cpus, before.ticks, before.busy_ticks), (2, 1000, 150));
        write("stat", "cpu  190 0 50 810 50 0 0 0 7 0\ncpu0 1\ncpu1 1\n");
        write("net/dev", "eth0: 3000 1 0 0 0 0 0 0 600 1 0 0 0 0 0 0\n");
        write("diskstats", " 8 0 sda 10 0 102 5 20 0 204 9 0\n 259 0 nvme0n1 1 0 3 0 1 0 4 0\n");
        write("net/snmp", "Tcp: RetransSegs\nTcp: 45\n");
        let usage = HostCounters::read(root.path()).compute_usage_since(&before);
        assert_eq!((usage.cpu_share, usage.memory_total, usage.memory_used), (0.9, 1_024_000, 614_400));
        assert_eq!((usage.network_received, usage.network_sent), (2000, 100));
        assert_eq!((usage.disk_read, usage.disk_written, usage.retransmitted_segments), (1024, 2048, 3));
        // Counters that begin again, or files that are missing, give no usage.
        let empty = HostCounters::read(Path::new("/nonexistent"));
        assert_eq!(empty.compute_usage_since(&before), HostUsage::default());
    }
}
