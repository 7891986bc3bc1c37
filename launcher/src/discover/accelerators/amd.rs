//! [`list_amd_gpus`]: lists the GPUs of AMD.
use super::{device_files::DeviceFiles, discovered_accelerators::DiscoveredAccelerators};
use jobspec::AcceleratorKind;
use protocol::hardware::Accelerator;

/// The directory in which AMD's compute driver (KFD) lists CPUs and GPUs as nodes.
const KFD_NODES_DIRECTORY: &str = "sys/class/kfd/kfd/topology/nodes";

/// Lists the AMD GPUs that this process may open, in the order in which ROCm numbers them. Only
/// GPUs have SIMD units. A process needs /dev/kfd and the render node of each GPU. The driver hides
/// the properties of GPUs that the control group denies.
pub(super) fn list_amd_gpus(tree: &DeviceFiles<'_>, found: &mut DiscoveredAccelerators) {
    let is_node = |name: &String| name.starts_with("renderD");
    let has_render_nodes = tree.list_names("dev/dri").iter().any(is_node);
    let is_driver_usable = tree.select_entries("dev", |name| (name == "kfd").then_some(())).is_empty()
        || tree.is_permitted("dev/kfd");
    for node in tree.list_numbers(KFD_NODES_DIRECTORY, "") {
        let Some(text) = tree.read_text(format!("{KFD_NODES_DIRECTORY}/{node}/properties")) else { continue };
        let value = |name: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '))?;
            line.trim().parse::<u64>().ok()
        };
        if value("simd_count").is_none_or(|count| count == 0) {
            continue;
        }
        let render_node = value("drm_render_minor").filter(|minor| has_render_nodes && *minor > 0);
        let is_permitted = |minor| tree.is_permitted(format!("dev/dri/renderD{minor}"));
        if !is_driver_usable || render_node.is_some_and(|minor| !is_permitted(minor)) {
            found.denied += 1;
            continue;
        }
        // `location_id` combines bus, device and function.
        let bus = value("location_id").map(|id| {
            let domain = value("domain").unwrap_or(0);
            format!("{domain:04x}:{:02x}:{:02x}.{:x}", id >> 8 & 0xff, id >> 3 & 0x1f, id & 7)
        });
        let numa_node = bus.as_deref().and_then(|bus| tree.read_numa_node(bus));
        let uuid = value("unique_id").filter(|id| *id != 0).map(|id| format!("GPU-{id:016x}"));
        found.accelerators.push(Accelerator {
            bus,
            uuid,
            numa_node,
            ..Accelerator::new(AcceleratorKind::Rocm)
        });
    }
}
