//! [`list_xpus`]: lists the GPUs of Intel and their tiles.
use super::{device_files::DeviceFiles, discovered_accelerators::DiscoveredAccelerators};
use jobspec::{AcceleratorKind, env};
use protocol::hardware::Accelerator;

/// The directory in /sys in which the kernel lists graphics devices.
const DRM_DIRECTORY: &str = "sys/class/drm";
/// The PCI vendor number of Intel.
const INTEL_VENDOR_ID: u32 = 0x8086;
/// The PCI class number of display controllers, without subclass and interface.
const DISPLAY_PCI_CLASS: u32 = 0x03;
/// The PCI address of the graphics unit inside an Intel CPU, which is not listed as an accelerator.
const INTEGRATED_GPU_ADDRESS: &str = "0000:00:02.0";
/// The largest number of tiles of an Intel GPU that are counted.
const MAX_TILES: usize = 8;

/// Lists the Intel GPUs that this process may open, in the order of their PCI addresses. Graphics
/// that are integrated in a CPU are left out.
///
/// By default, Level Zero numbers the tiles of GPUs, so each tile is an accelerator. If
/// `ZE_FLAT_DEVICE_HIERARCHY` is `COMPOSITE`, Level Zero numbers GPUs.
pub(super) fn list_xpus(
    tree: &DeviceFiles<'_>,
    variable: &dyn Fn(&str) -> Option<String>,
    found: &mut DiscoveredAccelerators,
) {
    let is_composite = variable(env::ZE_FLAT_DEVICE_HIERARCHY).is_some_and(|mode| mode == "COMPOSITE");
    let mut gpus = Vec::new();
    for number in tree.list_numbers(DRM_DIRECTORY, "renderD") {
        let device = format!("{DRM_DIRECTORY}/renderD{number}/device");
        let class = tree.read_hex(format!("{device}/class")).map(|class| class >> 16);
        let bus = tree.read_link_name(&device);
        if tree.read_hex(format!("{device}/vendor")) != Some(INTEL_VENDOR_ID)
            || class.is_some_and(|class| class != DISPLAY_PCI_CLASS)
            || bus.as_deref() == Some(INTEGRATED_GPU_ADDRESS)
        {
            continue;
        }
        if !tree.is_permitted(format!("dev/dri/renderD{number}")) {
            found.denied += 1;
            continue;
        }
        let numa_node = bus.as_deref().and_then(|bus| tree.read_numa_node(bus));
        let gpu = Accelerator { bus, numa_node, ..Accelerator::new(AcceleratorKind::Xpu) };
        gpus.push((gpu, if is_composite { 1 } else { count_tiles(tree, &device) }));
    }
    gpus.sort_by(|(a, _), (b, _)| a.bus.cmp(&b.bus));
    found.accelerators.extend(gpus.into_iter().flat_map(|(gpu, tiles)| vec![gpu; tiles]));
}

/// Returns the number of tiles of the Intel GPU with the sysfs directory `device`. The drivers xe
/// and i915 list tiles in different directories.
fn count_tiles(tree: &DeviceFiles<'_>, device: &str) -> usize {
    let xe = tree.list_numbers(device, "tile").len();
    let nodes = tree.list_names(format!("{device}/drm"));
    let i915 =
        nodes.iter().map(|node| tree.list_numbers(format!("{device}/drm/{node}/gt"), "gt").len()).max();
    xe.max(i915.unwrap_or(0)).clamp(1, MAX_TILES)
}
