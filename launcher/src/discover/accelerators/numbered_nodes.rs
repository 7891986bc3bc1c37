//! Lists Ascend NPUs, Gaudi HPUs and AWS NeuronCores, whose drivers name device nodes in /dev by
//! numbers.
use super::{device_files::DeviceFiles, discovered_accelerators::DiscoveredAccelerators};
use jobspec::{AcceleratorKind, env};
use protocol::hardware::Accelerator;

/// The directory in /sys in which the kernel lists compute accelerators.
const ACCEL_DIRECTORY: &str = "sys/class/accel";
/// The PCI vendor number of Habana Labs, which makes Gaudi.
const HABANA_VENDOR_ID: u32 = 0x1da3;
/// The largest number of NeuronCores of a Neuron device that are listed.
const MAX_CORES_PER_DEVICE: u32 = 128;

/// Lists the Ascend NPUs that this process may open, in the order of their device numbers.
pub(super) fn list_npus(tree: &DeviceFiles<'_>, found: &mut DiscoveredAccelerators) {
    let nodes = list_permitted_nodes(tree, "dev", "davinci", found);
    found.accelerators.extend(nodes.iter().map(|_| Accelerator::new(AcceleratorKind::Npu)));
}

/// Lists the Gaudi accelerators that this process may open, in the order of their module ids. The
/// module id, which `HABANA_VISIBLE_MODULES` lists, differs from the number of the device node. The
/// id is unknown with drivers that do not state it.
pub(super) fn list_hpus(tree: &DeviceFiles<'_>, found: &mut DiscoveredAccelerators) {
    let mut hpus = Vec::new();
    for number in tree.list_numbers("dev/accel", "accel") {
        let device = format!("{ACCEL_DIRECTORY}/accel{number}/device");
        // Accelerators of other vendors have the same names.
        if tree.read_hex(format!("{device}/vendor")) != Some(HABANA_VENDOR_ID) {
            continue;
        }
        if !tree.is_permitted(format!("dev/accel/accel{number}")) {
            found.denied += 1;
            continue;
        }
        hpus.push(Accelerator {
            bus: tree.read_link_name(&device),
            number: tree.read_value(format!("{device}/module_id")),
            numa_node: tree.read_value(format!("{device}/numa_node")),
            ..Accelerator::new(AcceleratorKind::Hpu)
        });
    }
    if hpus.is_empty() {
        // Drivers for kernels before 6.2 create these nodes.
        let nodes = list_permitted_nodes(tree, "dev", "hl", found);
        hpus.extend(nodes.iter().map(|_| Accelerator::new(AcceleratorKind::Hpu)));
    }
    hpus.sort_by_key(|hpu| hpu.number);
    found.accelerators.extend(hpus);
}

/// Lists the NeuronCores of the Neuron devices that this process may open. The runtime numbers the
/// cores of all devices from 0. If the driver does not state how many cores a device has, the
/// device counts as one accelerator, whose number is unknown.
pub(super) fn list_neuron_cores(
    tree: &DeviceFiles<'_>,
    variable: &dyn Fn(&str) -> Option<String>,
    found: &mut DiscoveredAccelerators,
) {
    let devices = list_permitted_nodes(tree, "dev", "neuron", found);
    let cores: Vec<Option<u32>> =
        devices.iter().map(|device| count_neuron_cores(tree, *device, variable)).collect();
    let is_known = cores.iter().all(Option::is_some);
    let count = cores.into_iter().map(|count| count.filter(|_| is_known).unwrap_or(1)).sum::<u32>();
    let core = |number| Accelerator {
        number: is_known.then_some(number),
        ..Accelerator::new(AcceleratorKind::Neuron)
    };
    found.accelerators.extend((0..count).map(core));
}

/// Returns the number of logical NeuronCores of the Neuron device with the number `device`, or
/// `None` if the driver does not state it. Devices of the second and later generations of Trainium
/// combine two physical cores to a logical core, unless an environment variable states another
/// number.
fn count_neuron_cores(
    tree: &DeviceFiles<'_>,
    device: u32,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Option<u32> {
    let directory = format!("sys/devices/virtual/neuron_device/neuron{device}");
    let listed = || Some(tree.list_numbers(&directory, "neuron_core").len() as u32);
    let physical = tree.read_value::<u32>(format!("{directory}/core_count")).or_else(listed);
    let physical = physical.filter(|count| (1..=MAX_CORES_PER_DEVICE).contains(count))?;
    let names = [env::NEURON_LOGICAL_NC_CONFIG, env::NEURON_RT_VIRTUAL_CORE_SIZE];
    let combined = names.iter().find_map(|name| variable(name)?.trim().parse::<u32>().ok());
    let model = || tree.read_text(format!("{directory}/info/architecture/device_name")).unwrap_or_default();
    let default = || if matches!(model().trim(), "Trainium2" | "Trainium3") { 2 } else { 1 };
    Some((physical / combined.unwrap_or_else(default).max(1)).max(1))
}

/// Returns the numbers N of the device nodes `{prefix}N` that this process may open, and adds the
/// number of other such nodes to `found.denied`.
fn list_permitted_nodes(
    tree: &DeviceFiles<'_>,
    directory: &str,
    prefix: &str,
    found: &mut DiscoveredAccelerators,
) -> Vec<u32> {
    let nodes = tree.list_numbers(directory, prefix);
    let (permitted, denied): (Vec<u32>, Vec<u32>) =
        nodes.into_iter().partition(|n| tree.is_permitted(format!("{directory}/{prefix}{n}")));
    found.denied += denied.len() as u32;
    permitted
}
