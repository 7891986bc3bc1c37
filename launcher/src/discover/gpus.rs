//! [`detect`]: the GPUs of this machine as its drivers list them, without loading a GPU library.
use contract::machine::{Gpu, GpuVendor};
use std::{fs, path::Path};

/// Most GPUs of a machine.
const MAX_GPUS: usize = 1024;

/// The GPUs of this machine in the order of the PCI bus, which is also CUDA's order where all GPUs
/// are alike.
pub(super) fn detect(root: &Path) -> Vec<Gpu> {
    let mut found = nvidia_gpus(root);
    if found.is_empty() {
        found = amd(root);
    }
    found.truncate(MAX_GPUS);
    found
}

/// The GPUs that a test simulates: `count` NVIDIA GPUs.
pub(super) fn simulated(count: Option<&str>) -> Option<Vec<Gpu>> {
    let count = count?.parse::<usize>().ok()?.min(MAX_GPUS);
    Some(vec![Gpu { vendor: GpuVendor::Nvidia, bus: None, uuid: None, numa_node: None }; count])
}

fn nvidia_gpus(root: &Path) -> Vec<Gpu> {
    let mut buses: Vec<String> = entry_names(&root.join("proc/driver/nvidia/gpus"));
    buses.sort();
    let number = |name: String| name.strip_prefix("nvidia")?.parse::<u32>().ok();
    let devices: Vec<u32> = entry_names(&root.join("dev")).into_iter().filter_map(number).collect();
    if buses.is_empty() {
        // A container may hide the driver's list but show the devices.
        return vec![
            Gpu { vendor: GpuVendor::Nvidia, bus: None, uuid: None, numa_node: None };
            devices.len()
        ];
    }
    let gpu = |bus: String| {
        let information = root.join("proc/driver/nvidia/gpus").join(&bus).join("information");
        let text = fs::read_to_string(information).unwrap_or_default();
        let field = |what: &str| text.lines().find_map(|l| l.strip_prefix(what)).map(str::trim);
        // A container may show the list of the whole host but only some of its devices.
        let device = field("Device Minor:").and_then(|n| n.parse::<u32>().ok());
        if !devices.is_empty() && device.is_some_and(|n| !devices.contains(&n)) {
            return None;
        }
        let uuid = field("GPU UUID:").filter(|u| !u.contains('?')).map(str::to_owned);
        Some(Gpu { vendor: GpuVendor::Nvidia, uuid, numa_node: numa_node(root, &bus), bus: Some(bus) })
    };
    buses.into_iter().filter_map(gpu).collect()
}

/// AMD's compute driver lists CPUs and GPUs as nodes; a GPU has SIMD units.
fn amd(root: &Path) -> Vec<Gpu> {
    let nodes = root.join("sys/class/kfd/kfd/topology/nodes");
    let mut numbers: Vec<u32> = entry_names(&nodes).iter().filter_map(|n| n.parse().ok()).collect();
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
        // The number combines bus, device and function.
        let bus = value("location_id").map(|id| {
            let domain = value("domain").unwrap_or(0);
            format!("{domain:04x}:{:02x}:{:02x}.{:x}", id >> 8 & 0xff, id >> 3 & 0x1f, id & 7)
        });
        let node = bus.as_deref().and_then(|bus| numa_node(root, bus));
        Some(Gpu { vendor: GpuVendor::Amd, bus, uuid: None, numa_node: node })
    };
    numbers.iter().filter_map(gpu).collect()
}

/// The NUMA node of a PCI device; `None` where the kernel writes -1.
fn numa_node(root: &Path, bus: &str) -> Option<u32> {
    let file = root.join("sys/bus/pci/devices").join(bus.to_lowercase()).join("numa_node");
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn entry_names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).map(|d| d.flatten().collect::<Vec<_>>()).unwrap_or_default();
    entries.into_iter().filter_map(|e| e.file_name().into_string().ok()).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
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
            write(root.path(), &format!("proc/driver/nvidia/gpus/{bus}/information"), &text);
            write(root.path(), &format!("sys/bus/pci/devices/{}/numa_node", bus.to_lowercase()), node);
        }
        let found = detect(root.path());
        let nodes: Vec<_> = found.iter().map(|g| (g.bus.as_deref().unwrap_or(""), g.numa_node)).collect();
        assert_eq!(nodes, [("0000:17:00.0", Some(0)), ("0000:65:00.0", None), ("0000:C1:00.0", Some(1))]);
        assert_eq!(found[0].uuid.as_deref(), Some("GPU-0000:17:00.0"));
        // A container with one of the GPUs that sees the list of the host.
        write(root.path(), "dev/nvidia10", "");
        let given: Vec<_> = detect(root.path()).into_iter().filter_map(|g| g.bus).collect();
        assert_eq!(given, ["0000:17:00.0"]);
    }

    #[test]
    fn devices_without_a_list_and_gpus_of_amd_are_detected() {
        let root = tempfile::tempdir().expect("directory");
        assert!(detect(root.path()).is_empty());
        for name in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"] {
            write(root.path(), &format!("dev/{name}"), "");
        }
        assert_eq!(detect(root.path()).len(), 2);
        let root = tempfile::tempdir().expect("directory");
        write(
            root.path(),
            "sys/class/kfd/kfd/topology/nodes/0/properties",
            "cpu_cores_count 8\nsimd_count 0\n",
        );
        write(
            root.path(),
            "sys/class/kfd/kfd/topology/nodes/1/properties",
            "simd_count 440\nlocation_id 5888\ndomain 0\n",
        );
        write(root.path(), "sys/bus/pci/devices/0000:17:00.0/numa_node", "1\n");
        let bus = Some("0000:17:00.0".to_owned());
        assert_eq!(
            detect(root.path()),
            [Gpu { vendor: GpuVendor::Amd, bus, uuid: None, numa_node: Some(1) }]
        );
    }
}
