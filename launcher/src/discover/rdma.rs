//! Finds InfiniBand, RoCE and EFA devices, by which other hosts access memory directly (RDMA).
//! Their ports are in /sys/class/infiniband, and the device nodes through which programs use them
//! are in /dev/infiniband.
use super::network_interfaces::read_driver_name;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use protocol::network_probe::{RdmaDevice, RdmaPort, RdmaReport};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// The largest number of RDMA devices, and of ports of a device, that are inspected.
const MAX_DEVICES_OR_PORTS: usize = 64;
/// The largest number of addresses (GIDs) of a port of an RDMA device that are counted.
const MAX_GIDS: usize = 1024;
/// The file names of the kernel's counters of damaged, lost or late packets and of retrained links
/// of an RDMA port.
const ERROR_COUNTERS: [&str; 7] = [
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "VL15_dropped",
];

/// Lists the RDMA devices of the machine with the state, rate and error counters of their ports,
/// from files below the directory `root`.
pub(crate) fn inspect_rdma(root: &Path) -> RdmaReport {
    let devices = list_entries_in_order(&root.join("sys/class/infiniband"), |_| true);
    let nodes = list_entries_in_order(&root.join("dev/infiniband"), |name| {
        let number = name.strip_prefix("uverbs");
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    });
    let denied = nodes.iter().find_map(|node| {
        let error = fs::OpenOptions::new().read(true).write(true).open(node).err()?;
        Some(format!("{}: {error}", node.strip_prefix(root).map_or(node.display(), Path::display)))
    });
    RdmaReport {
        devices: devices.iter().map(|directory| inspect_rdma_device(directory)).collect(),
        verbs_nodes: nodes.len() as u32,
        denied_node: denied.map(|text| format!("/{}", text.trim_start_matches('/'))),
        locked_memory: getrlimit(Resource::RLIMIT_MEMLOCK)
            .ok()
            .and_then(|(soft, _)| (soft != RLIM_INFINITY).then_some(soft)),
    }
}

/// Lists the paths of those entries of a directory that `selects` accepts by name, in the order of
/// their names and trailing numbers. Returns nothing if the directory does not exist.
fn list_entries_in_order(directory: &Path, selects: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| selects(name));
    names.sort_by_key(|name| {
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        (prefix.to_owned(), name[prefix.len()..].parse::<u64>().unwrap_or(0))
    });
    names.truncate(MAX_DEVICES_OR_PORTS);
    names.iter().map(|name| directory.join(name)).collect()
}

/// Returns the last component of a path as text.
fn path_to_file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Reads the name, the driver and the ports of an RDMA device from `directory`, its directory in
/// /sys/class/infiniband.
fn inspect_rdma_device(directory: &Path) -> RdmaDevice {
    let is_number = |name: &str| name.parse::<u32>().is_ok();
    let ports = list_entries_in_order(&directory.join("ports"), is_number);
    RdmaDevice {
        name: path_to_file_name(directory),
        driver: read_driver_name(directory),
        ports: ports.iter().map(|port| inspect_rdma_port(port)).collect(),
    }
}

/// Reads the state, the rate, the address types and the error counters of a port of an RDMA device
/// from `directory`, its directory in /sys/class/infiniband/DEVICE/ports.
fn inspect_rdma_port(directory: &Path) -> RdmaPort {
    let text = |file: &str| fs::read_to_string(directory.join(file)).unwrap_or_default().trim().to_owned();
    // The kernel numbers the states: `4: ACTIVE`.
    let state = |file: &str| {
        let text = text(file);
        text.split_once(": ").map_or(text.clone(), |(_, name)| name.to_owned())
    };
    let counter = |name: &&str| {
        let count = text(&format!("counters/{name}")).parse::<u64>().ok().filter(|count| *count > 0)?;
        Some(((*name).to_owned(), count))
    };
    RdmaPort {
        number: path_to_file_name(directory).parse().unwrap_or(0),
        state: state("state"),
        physical_state: state("phys_state"),
        rate: text("rate"),
        link_layer: text("link_layer"),
        gid_types: count_gid_types(directory),
        error_counters: ERROR_COUNTERS.iter().filter_map(counter).collect(),
    }
}

/// Counts the addresses (GIDs) of a port of an RDMA device by their type, such as RoCE v2. Unused
/// entries of the table, which consist of zeros, are left out.
fn count_gid_types(directory: &Path) -> BTreeMap<String, u32> {
    let mut types = BTreeMap::new();
    for index in 0..MAX_GIDS {
        let Ok(gid) = fs::read_to_string(directory.join(format!("gids/{index}"))) else { break };
        if gid.chars().any(|c| c.is_ascii_hexdigit() && c != '0') {
            let kind = fs::read_to_string(directory.join(format!("gid_attrs/types/{index}")));
            let kind = kind.ok().map(|kind| kind.trim().to_owned()).filter(|kind| !kind.is_empty());
            *types.entry(kind.unwrap_or_else(|| "unknown".to_owned())).or_insert(0) += 1;
        }
    }
    types
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Writes the files of a port with one address of the type `gid_type`.
    fn write_port(root: &Path, device: &str, driver: &str, values: [&str; 4], gid_type: &str) {
        let device = root.join("sys/class/infiniband").join(device);
        let port = device.join("ports/1");
        for directory in ["counters", "gids", "gid_attrs/types"] {
            fs::create_dir_all(port.join(directory)).expect("a directory");
        }
        fs::create_dir_all(device.join("device")).expect("a directory");
        symlink(format!("../drivers/{driver}"), device.join("device/driver")).expect("a link");
        for (file, text) in ["state", "phys_state", "rate", "link_layer"].iter().zip(values) {
            fs::write(port.join(file), format!("{text}\n")).expect("a file");
        }
        fs::write(port.join("gids/0"), "fe80:0000:0000:0000:0a00:27ff:fe00:0001\n").expect("a file");
        fs::write(port.join("gids/1"), "0000:0000:0000:0000:0000:0000:0000:0000\n").expect("a file");
        fs::write(port.join("gid_attrs/types/0"), format!("{gid_type}\n")).expect("a file");
        fs::write(port.join("counters/symbol_error"), "12\n").expect("a file");
        fs::write(port.join("counters/port_rcv_errors"), "0\n").expect("a file");
    }

    #[test]
    fn ports_of_all_kinds_of_devices_are_inspected() {
        let root = tempfile::tempdir().expect("a directory");
        let active = ["4: ACTIVE", "5: LinkUp", "200 Gb/sec (4X HDR)", "InfiniBand"];
        write_port(root.path(), "mlx5_10", "mlx5_core", active, "IB/RoCE v1");
        let down = ["1: DOWN", "3: Disabled", "40 Gb/sec (4X QDR)", "Ethernet"];
        write_port(root.path(), "mlx5_2", "mlx5_core", down, "RoCE v2");
        write_port(
            root.path(),
            "efa_0",
            "efa",
            ["4: ACTIVE", "5: LinkUp", "100 Gb/sec", "Unspecified"],
            "EFA",
        );
        fs::create_dir_all(root.path().join("dev/infiniband")).expect("a directory");
        for node in ["uverbs0", "uverbs1", "rdma_cm", "uverbs"] {
            fs::write(root.path().join("dev/infiniband").join(node), "").expect("a file");
        }
        let found = inspect_rdma(root.path());
        let names: Vec<&str> = found.devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["efa_0", "mlx5_2", "mlx5_10"]);
        let (efa, down) = (&found.devices[0], &found.devices[1].ports[0]);
        assert_eq!(efa.driver.as_deref(), Some("efa"));
        assert_eq!((down.state.as_str(), down.physical_state.as_str()), ("DOWN", "Disabled"));
        assert_eq!((down.number, down.link_layer.as_str()), (1, "Ethernet"));
        assert_eq!(down.gid_types, [("RoCE v2".to_owned(), 1)].into());
        assert_eq!(down.error_counters, [("symbol_error".to_owned(), 12)].into());
        assert_eq!((found.verbs_nodes, found.denied_node), (2, None));
    }

    #[test]
    fn a_machine_without_rdma_has_no_devices() {
        let root = tempfile::tempdir().expect("a directory");
        let found = inspect_rdma(root.path());
        assert_eq!((found.devices, found.verbs_nodes, found.denied_node), (Vec::new(), 0, None));
    }
}
