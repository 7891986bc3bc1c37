//! [`detect_gpus`]: detects the GPUs of this machine from files of the GPU drivers, without loading
//! a GPU library.
use nix::unistd::{AccessFlags, access};
use protocol::hardware::{GpuDevice, GpuVendor};
use std::{fs, path::Path};

/// The largest number of GPUs of a machine.
const MAX_GPUS: usize = 1024;

/// Detects the GPUs of NVIDIA, or those of AMD if there are none, in the order of the PCI bus. CUDA
/// uses the same order if all GPUs are of one model. The files are read below `root`.
///
/// GPUs that the cgroup of this process denies are left out, because CUDA and ROCm do not number
/// them. With ConstrainDevices, Slurm denies the GPUs of other jobs, and the numbers in
/// `CUDA_VISIBLE_DEVICES` count only the GPUs of the job.
pub(super) fn detect_gpus(root: &Path) -> Vec<GpuDevice> {
    detect_permitted_gpus(root, &is_device_permitted)
}

/// Detects the GPUs whose device node `is_permitted` accepts.
fn detect_permitted_gpus(root: &Path, is_permitted: &dyn Fn(&Path) -> bool) -> Vec<GpuDevice> {
    let mut found = list_nvidia_gpus(root, is_permitted);
    if found.is_empty() {
        found = list_amd_gpus(root);
    }
    found.truncate(MAX_GPUS);
    found
}

/// Returns `count` NVIDIA GPUs for tests (`LAUNCH_GPUS`), but at most [`MAX_GPUS`]. Returns `None`
/// if `count` is absent or not a number.
pub(super) fn simulate_gpus(count: Option<&str>) -> Option<Vec<GpuDevice>> {
    let count = count?.parse::<usize>().ok()?.min(MAX_GPUS);
    Some(vec![GpuDevice { vendor: GpuVendor::Nvidia, bus: None, uuid: None, numa_node: None }; count])
}

/// Returns whether this process may open a device node. The kernel also checks the cgroup, and the
/// driver does not notice the check.
fn is_device_permitted(node: &Path) -> bool {
    access(node, AccessFlags::R_OK | AccessFlags::W_OK).is_ok()
}

/// Lists the GPUs of NVIDIA's driver that this process may open, in the order of the PCI bus.
fn list_nvidia_gpus(root: &Path, is_permitted: &dyn Fn(&Path) -> bool) -> Vec<GpuDevice> {
    let mut buses: Vec<String> = list_entry_names(&root.join("proc/driver/nvidia/gpus"));
    buses.sort();
    let number = |name: String| name.strip_prefix("nvidia")?.parse::<u32>().ok();
    let nodes: Vec<u32> = list_entry_names(&root.join("dev")).into_iter().filter_map(number).collect();
    let is_usable = |number: &u32| is_permitted(&root.join(format!("dev/nvidia{number}")));
    let devices: Vec<u32> = nodes.iter().copied().filter(is_usable).collect();
    if buses.is_empty() {
        // A container may hide the driver's list but show the device nodes.
        return vec![
            GpuDevice { vendor: GpuVendor::Nvidia, bus: None, uuid: None, numa_node: None };
            devices.len()
        ];
    }
    let gpu = |bus: String| {
        let information = root.join("proc/driver/nvidia/gpus").join(&bus).join("information");
        let text = fs::read_to_string(information).unwrap_or_default();
        let field = |what: &str| text.lines().find_map(|l| l.strip_prefix(what)).map(str::trim);
        // A container may show the list of the whole host but only some of its devices, and a
        // cgroup may deny some of them. Without any device node, the list is all there is.
        let device = field("Device Minor:").and_then(|n| n.parse::<u32>().ok());
        if !nodes.is_empty() && device.is_some_and(|n| !devices.contains(&n)) {
            return None;
        }
        let uuid = field("GPU UUID:").filter(|u| !u.contains('?')).map(str::to_owned);
        Some(GpuDevice {
            vendor: GpuVendor::Nvidia,
            uuid,
            numa_node: read_numa_node(root, &bus),
            bus: Some(bus),
        })
    };
    buses.into_iter().filter_map(gpu).collect()
}

/// Lists the GPUs of AMD's compute driver. The driver lists CPUs and GPUs as nodes, and only GPUs
/// have SIMD units.
fn list_amd_gpus(root: &Path) -> Vec<GpuDevice> {
    let nodes = root.join("sys/class/kfd/kfd/topology/nodes");
    let mut numbers: Vec<u32> = list_entry_names(&nodes).iter().filter_map(|n| n.parse().ok()).collect();
    numbers.sort_unstable();
    let gpu = |number: &u32| {
        let text = fs::read_to_string(nodes.join(number.to_string()).join("properties")).ok()?;
        let value = |name: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '))?;
            line.trim().parse::<u64>().ok()
        };
        if value("simd_count")? == 0 {
            return None;
        }
        // `location_id` combines bus, device and function.
        let bus = value("location_id").map(|id| {
            let domain = value("domain").unwrap_or(0);
            format!("{domain:04x}:{:02x}:{:02x}.{:x}", id >> 8 & 0xff, id >> 3 & 0x1f, id & 7)
        });
        let node = bus.as_deref().and_then(|bus| read_numa_node(root, bus));
        Some(GpuDevice { vendor: GpuVendor::Amd, bus, uuid: None, numa_node: node })
    };
    numbers.iter().filter_map(gpu).collect()
}

/// Reads the NUMA node of the PCI device with the address `bus`. Returns `None` if the kernel
/// states -1 or the file cannot be read.
fn read_numa_node(root: &Path, bus: &str) -> Option<u32> {
    let file = root.join("sys/bus/pci/devices").join(bus.to_lowercase()).join("numa_node");
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Returns the names of the entries of a directory; empty if the directory cannot be read.
fn list_entry_names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).map(|d| d.flatten().collect::<Vec<_>>()).unwrap_or_default();
    entries.into_iter().filter_map(|e| e.file_name().into_string().ok()).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn write_file(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
        fs::write(path, text).expect("file");
    }

    #[test]
    fn nvidia_gpus_are_in_the_order_of_the_bus() {
        let root = tempfile::tempdir().expect("directory");
        for (bus, node) in [("0000:C1:00.0", "1"), ("0000:17:00.0", "0"), ("0000:65:00.0", "-1")] {
            let minor = node.trim_start_matches('-');
            let text = format!("Model: \t\t H100\nGPU UUID: \t GPU-{bus}\nDevice Minor: \t 1{minor}\n");
            write_file(root.path(), &format!("proc/driver/nvidia/gpus/{bus}/information"), &text);
            write_file(root.path(), &format!("sys/bus/pci/devices/{}/numa_node", bus.to_lowercase()), node);
        }
        let found = detect_gpus(root.path());
        let nodes: Vec<_> = found.iter().map(|g| (g.bus.as_deref().unwrap_or(""), g.numa_node)).collect();
        assert_eq!(nodes, [("0000:17:00.0", Some(0)), ("0000:65:00.0", None), ("0000:C1:00.0", Some(1))]);
        assert_eq!(found[0].uuid.as_deref(), Some("GPU-0000:17:00.0"));
        // A container with one of the GPUs that sees the list of the host.
        write_file(root.path(), "dev/nvidia10", "");
        let given: Vec<_> = detect_gpus(root.path()).into_iter().filter_map(|g| g.bus).collect();
        assert_eq!(given, ["0000:17:00.0"]);
    }

    /// Four GPUs, two on each NUMA node. The device numbers are not in the order of the bus.
    #[test]
    fn gpus_that_the_cgroup_denies_are_not_counted() {
        let root = tempfile::tempdir().expect("directory");
        for (bus, node, minor) in [("17", 0, 2), ("65", 0, 3), ("a1", 1, 0), ("c1", 1, 1)] {
            let text = format!("Device Minor: \t {minor}\n");
            write_file(root.path(), &format!("proc/driver/nvidia/gpus/0000:{bus}:00.0/information"), &text);
            let numa = format!("sys/bus/pci/devices/0000:{bus}:00.0/numa_node");
            write_file(root.path(), &numa, &node.to_string());
            write_file(root.path(), &format!("dev/nvidia{minor}"), "");
        }
        let nodes_with = |permitted: &[&str]| {
            let is_permitted = |node: &Path| permitted.iter().any(|name| node.ends_with(name));
            let found = detect_permitted_gpus(root.path(), &is_permitted);
            found.iter().map(|gpu| gpu.numa_node).collect::<Vec<_>>()
        };
        assert_eq!(nodes_with(&["nvidia0", "nvidia1"]), [Some(1); 2]);
        assert_eq!(nodes_with(&["nvidia1", "nvidia2"]), [Some(0), Some(1)]);
        assert_eq!(nodes_with(&[]), []);
        fs::remove_dir_all(root.path().join("proc")).expect("a list to remove");
        assert_eq!(nodes_with(&["nvidia1", "nvidia2", "nvidia3"]), [None; 3]);
    }

    #[test]
    fn devices_without_a_list_and_gpus_of_amd_are_detected() {
        let root = tempfile::tempdir().expect("directory");
        assert!(detect_gpus(root.path()).is_empty());
        for name in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"] {
            write_file(root.path(), &format!("dev/{name}"), "");
        }
        assert_eq!(detect_gpus(root.path()).len(), 2);
        let root = tempfile::tempdir().expect("directory");
        write_file(
            root.path(),
            "sys/class/kfd/kfd/topology/nodes/0/properties",
            "cpu_cores_count 8\nsimd_count 0\n",
        );
        write_file(
            root.path(),
            "sys/class/kfd/kfd/topology/nodes/1/properties",
            "simd_count 440\nlocation_id 5888\ndomain 0\n",
        );
        write_file(root.path(), "sys/bus/pci/devices/0000:17:00.0/numa_node", "1\n");
        let bus = Some("0000:17:00.0".to_owned());
        assert_eq!(
            detect_gpus(root.path()),
            [GpuDevice { vendor: GpuVendor::Amd, bus, uuid: None, numa_node: Some(1) }]
        );
    }
}
