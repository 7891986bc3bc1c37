//! [`list_nvidia_gpus`]: lists the GPUs of NVIDIA and their MIG instances.
use super::{
    device_files::DeviceFiles, discovered_accelerators::DiscoveredAccelerators, mig_uuids::MigUuids,
};
use jobspec::AcceleratorKind;
use protocol::hardware::Accelerator;

/// The directory in which NVIDIA's driver lists its GPUs by their PCI addresses.
const NVIDIA_GPUS_DIRECTORY: &str = "proc/driver/nvidia/gpus";

/// Lists the NVIDIA GPUs that this process may open, in the order of their PCI addresses. CUDA uses
/// the same order if all GPUs are of one model. A GPU that is partitioned counts as its MIG
/// instances, and CUDA does not show other GPUs to a process that sees a MIG instance. `mig_uuids`
/// is called only if there are MIG instances.
pub(super) fn list_nvidia_gpus(
    tree: &DeviceFiles<'_>,
    mig_uuids: &dyn Fn() -> MigUuids,
    found: &mut DiscoveredAccelerators,
) {
    let nodes = tree.list_numbers("dev", "nvidia");
    let (usable, denied): (Vec<u32>, Vec<u32>) =
        nodes.iter().copied().partition(|n| tree.is_permitted(format!("dev/nvidia{n}")));
    let buses = tree.list_names(NVIDIA_GPUS_DIRECTORY);
    if buses.is_empty() {
        // A container may hide the driver's list but show the device nodes.
        found.denied += denied.len() as u32;
        found.accelerators.extend(usable.iter().map(|_| Accelerator::new(AcceleratorKind::Cuda)));
        return;
    }
    let (mut gpus, mut instances) = (Vec::new(), Vec::new());
    let mut uuids: Option<MigUuids> = None;
    for bus in buses {
        let text = tree.read_text(format!("{NVIDIA_GPUS_DIRECTORY}/{bus}/information")).unwrap_or_default();
        let field = |what: &str| text.lines().find_map(|l| l.strip_prefix(what)).map(str::trim);
        // A container may show the list of the whole host but only some of its devices, and a
        // cgroup may deny some of them. Without any device node, the list is all there is.
        let device = field("Device Minor:").and_then(|n| n.parse::<u32>().ok());
        if !nodes.is_empty() && device.is_some_and(|n| !usable.contains(&n)) {
            found.denied += u32::from(device.is_some_and(|n| denied.contains(&n)));
            continue;
        }
        let uuid = field("GPU UUID:").filter(|u| !u.contains('?')).map(str::to_owned);
        let numa_node = tree.read_numa_node(&bus);
        let gpu = Accelerator { bus: Some(bus), uuid, numa_node, ..Accelerator::new(AcceleratorKind::Cuda) };
        let (usable_instances, denied_instances) = count_mig_instances(tree, device);
        found.denied += denied_instances;
        if usable_instances + denied_instances == 0 {
            gpus.push(gpu);
            continue;
        }
        let listed = uuids.get_or_insert_with(mig_uuids).list_for_gpu(gpu.uuid.as_deref());
        for index in 0..usable_instances as usize {
            // With another number of UUIDs, they are not those of the instances of this process.
            let uuid = listed.get(index).filter(|_| listed.len() == usable_instances as usize).cloned();
            instances.push(Accelerator { kind: AcceleratorKind::Mig, uuid, ..gpu.clone() });
        }
    }
    found.accelerators.extend(if instances.is_empty() { gpus } else { instances });
}

/// Returns how many MIG compute instances of a GPU this process may use, and how many it may not
/// use.
fn count_mig_instances(tree: &DeviceFiles<'_>, device: Option<u32>) -> (u32, u32) {
    let Some(device) = device else { return (0, 0) };
    let mig = format!("proc/driver/nvidia/capabilities/gpu{device}/mig");
    let has_nodes = !tree.list_names("dev/nvidia-caps").is_empty();
    let is_usable = |directory: &str| {
        let access = tree.read_text(format!("{directory}/access")).unwrap_or_default();
        let minor =
            access.lines().find_map(|l| l.strip_prefix("DeviceFileMinor:")?.trim().parse::<u32>().ok());
        let is_permitted = |n| tree.is_permitted(format!("dev/nvidia-caps/nvidia-cap{n}"));
        minor.is_some_and(|n| !has_nodes || is_permitted(n))
    };
    let (mut usable, mut denied) = (0, 0);
    for gpu_instance in tree.list_numbers(&mig, "gi") {
        let directory = format!("{mig}/gi{gpu_instance}");
        let is_parent_usable = is_usable(&directory);
        for compute_instance in tree.list_numbers(&directory, "ci") {
            match is_parent_usable && is_usable(&format!("{directory}/ci{compute_instance}")) {
                true => usable += 1,
                false => denied += 1,
            }
        }
    }
    (usable, denied)
}
