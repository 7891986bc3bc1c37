//! [`discover_local_host`]: reads the inventory of this machine (its CPUs, accelerators, memory and
//! network) from /proc, /sys, /dev and the environment.
use super::{
    accelerators, cgroup, cpu_list::parse_cpu_list, interface_addresses::list_interface_addresses, topology,
};
use jobspec::env;
use protocol::{control::HostInventory, host_name::read_host_name_below};
use std::{fs, io, net::IpAddr, path::Path};

/// Reads the inventory of this machine: its CPUs, accelerators, memory, network addresses and
/// relevant environment variables. The error names the file that cannot be read.
pub fn discover_local_host() -> io::Result<HostInventory> {
    let shm = nix::sys::statvfs::statvfs("/dev/shm").map_or(0, |fs| fs.blocks() * fs.fragment_size());
    let variable = |name: &str| std::env::var(name).ok();
    let mut found = discover_host_in_root(Path::new("/"), &variable)?;
    if let Some(simulated) = accelerators::parse_simulated_accelerators(variable(env::LAUNCH_GPUS).as_deref())
    {
        (found.accelerators, found.has_other_devices) = (simulated, false);
    }
    let reached_address = variable(env::SSH_CONNECTION).and_then(|text| parse_ssh_server_address(&text));
    let addresses = list_interface_addresses();
    Ok(HostInventory { inherited_env: read_inventory_env(), addresses, reached_address, shm, ..found })
}

/// Reads the CPUs, accelerators and memory of a machine from the files below `root`, which replaces
/// `/` in tests. The addresses, the size of /dev/shm and the environment are missing in the result.
/// `variable` returns environment variables of this process.
fn discover_host_in_root(
    root: &Path,
    variable: &dyn Fn(&str) -> Option<String>,
) -> io::Result<HostInventory> {
    let host = read_host_name_below(root)?;
    let status = read_file_below_root(root, "proc/self/status")?;
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap_or("");
    let cpus = parse_cpu_list(list.trim()).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("/proc/self/status lists no CPUs: `{}`", list.trim()),
        )
    })?;
    let limits = cgroup::read_cgroup_limits(root);
    let installed = read_file_below_root(root, "proc/meminfo")
        .ok()
        .and_then(|text| parse_total_memory(&text))
        .unwrap_or(0);
    let memory = match limits.memory {
        Some(limit) if installed == 0 || limit < installed => limit,
        _ => installed,
    };
    let topology = topology::read_topology(root, &cpus);
    let devices = accelerators::discover_accelerators(root, variable);
    Ok(HostInventory {
        host,
        cpus,
        quota: limits.cpus,
        memory,
        topology,
        accelerators: devices.accelerators,
        denied_accelerators: devices.denied,
        has_other_devices: devices.has_other_devices,
        ..HostInventory::default()
    })
}

/// Returns those environment variables of this process that affect jobs on this host, such as
/// `CUDA_VISIBLE_DEVICES`, with their values.
fn read_inventory_env() -> Vec<(String, String)> {
    let value = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let settings = env::USER_OVERRIDABLE_VARIABLES.iter().chain(&env::ACCELERATE_DEEPSPEED_VARIABLES);
    let choices = settings.filter_map(|name| Some(((*name).to_owned(), value(name)?)));
    // An empty list of devices hides all accelerators, so it is kept.
    let devices = env::DEVICE_VARIABLES.iter().chain(&env::INTERFACE_VARIABLES);
    choices.chain(devices.filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)))).collect()
}

/// Returns the IP address of this machine to which the SSH client has connected, from the value of
/// the variable `SSH_CONNECTION`.
fn parse_ssh_server_address(connection: &str) -> Option<IpAddr> {
    connection.split(' ').nth(2)?.parse().ok()
}

/// Reads the text of the file `path` below `root`, the directory that stands for `/`. The error
/// contains the path.
fn read_file_below_root(root: &Path, path: &str) -> io::Result<String> {
    fs::read_to_string(root.join(path)).map_err(|e| io::Error::new(e.kind(), format!("/{path}: {e}")))
}

/// Parses the total memory of the machine, in bytes, from the content of /proc/meminfo.
fn parse_total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::hardware::{Accelerator, CpuTopology};

    #[test]
    fn lists_of_cpus_are_parsed() {
        assert_eq!(parse_cpu_list("0-1"), Some(vec![0, 1]));
        assert_eq!(parse_cpu_list("8,0-2,10-11"), Some(vec![0, 1, 2, 8, 10, 11]));
        for bad in ["", "a", "3-1", "0-99999999", "0,,1"] {
            assert_eq!(parse_cpu_list(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_address_of_an_ssh_connection_is_parsed() {
        let parse = |text: &str| parse_ssh_server_address(text).map(|ip| ip.to_string());
        assert_eq!(parse("192.0.2.1 4711 10.1.2.3 22"), Some("10.1.2.3".to_owned()));
        assert_eq!(parse("fd00::1 4711 fd00::2 22"), Some("fd00::2".to_owned()));
        assert_eq!([parse(""), parse("a b"), parse("a b c d")], [None, None, None]);
    }

    #[test]
    fn this_machine_has_an_inventory() {
        let inventory = discover_local_host().expect("an inventory");
        assert!(!inventory.host.is_empty() && !inventory.cpus.is_empty() && inventory.memory > 0);
        assert!((1..=inventory.cpus.len() as u32).contains(&inventory.usable_cpu_count()));
        assert!(inventory.addresses.iter().any(|a| a.address.is_loopback()), "{:?}", inventory.addresses);
    }

    #[test]
    fn limits_of_a_container_are_found() {
        let root = tempfile::tempdir().expect("directory");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("parent")).expect("directory");
            fs::write(path, text).expect("file");
        };
        write("proc/sys/kernel/hostname", "node-7\n");
        write("proc/self/status", "Name:\tx\nCpus_allowed_list:\t2-5\n");
        write("proc/meminfo", "MemTotal:       1000 kB\nMemFree: 1 kB\n");
        write("proc/self/cgroup", "0::/a/b\n");
        write("sys/fs/cgroup/a/cpu.max", "250000 100000\n");
        write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
        write("sys/fs/cgroup/a/memory.max", "512000\n");
        for file in ["nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia"] {
            write(&format!("dev/{file}"), "");
        }
        let inventory = discover_host_in_root(root.path(), &|_| None).expect("an inventory");
        let expected = HostInventory {
            host: "node-7".into(),
            cpus: vec![2, 3, 4, 5],
            quota: Some(2.5),
            memory: 512_000,
            topology: CpuTopology::with_one_core_per_cpu(&[2, 3, 4, 5]),
            accelerators: vec![Accelerator::default(); 2],
            ..HostInventory::default()
        };
        assert_eq!(inventory, expected);
        assert_eq!(inventory.usable_cpu_count(), 2);
    }
}
