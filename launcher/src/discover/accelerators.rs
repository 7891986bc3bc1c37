//! [`discover_accelerators`]: finds the accelerators (GPUs, NPUs, …) of this machine from files of
//! their drivers, without loading a library of a vendor.
mod amd;
mod device_files;
mod discovered_accelerators;
mod intel;
mod mig_uuids;
mod numbered_nodes;
mod nvidia;
#[cfg(test)]
mod tests;

pub(super) use discovered_accelerators::DiscoveredAccelerators;

use device_files::DeviceFiles;
use jobspec::AcceleratorKind;
use mig_uuids::{MigUuids, read_mig_uuids};
use nix::unistd::{AccessFlags, access};
use protocol::hardware::Accelerator;
use std::{path::Path, sync::OnceLock};

/// The largest number of accelerators that are discovered on one machine. Further accelerators are
/// ignored.
const MAX_ACCELERATORS: usize = 1024;
/// The name prefixes, in /dev, of the device nodes of accelerators that launch cannot assign to
/// workers. These are GPUs in WSL and of NVIDIA's Tegra, and accelerators of Cambricon, Moore
/// Threads, Tecorigin and Google.
const UNSUPPORTED_DEVICE_PREFIXES: [&str; 7] =
    ["dxg", "nvhost-gpu", "nvmap", "cambricon_dev", "mtgpu.", "tcaicard", "accel"];

/// Finds the accelerators (GPUs, NPUs, …) of this machine, ordered within each kind as the vendor's
/// runtime numbers them. The files are read below `root`. `variable` returns environment variables
/// of this process.
///
/// Accelerators that the control group of this process denies are left out, because the runtimes do
/// not number them. With ConstrainDevices, a scheduler denies the GPUs of other jobs, and the
/// numbers in `CUDA_VISIBLE_DEVICES` count only the GPUs of the job.
pub(super) fn discover_accelerators(
    root: &Path,
    variable: &dyn Fn(&str) -> Option<String>,
) -> DiscoveredAccelerators {
    // An agent calls this function first before it has workers. Later, its main loop could reap the
    // process of the tool.
    /// The UUIDs of MIG instances that `nvidia-smi` prints; they are read once, at the first use,
    /// and kept.
    static MIG_UUIDS: OnceLock<MigUuids> = OnceLock::new();
    let tree = DeviceFiles::new(root, &is_device_permitted);
    discover_in_device_files(&tree, variable, &|| {
        MIG_UUIDS.get_or_init(|| read_mig_uuids("nvidia-smi")).clone()
    })
}

/// Finds the accelerators of a machine from the files of their drivers in `/dev`, `/proc` and
/// `/sys` below the root directory of `tree`. `mig_uuids` lists the UUIDs of MIG instances.
fn discover_in_device_files(
    tree: &DeviceFiles<'_>,
    variable: &dyn Fn(&str) -> Option<String>,
    mig_uuids: &dyn Fn() -> MigUuids,
) -> DiscoveredAccelerators {
    let mut found = DiscoveredAccelerators::default();
    nvidia::list_nvidia_gpus(tree, mig_uuids, &mut found);
    amd::list_amd_gpus(tree, &mut found);
    intel::list_xpus(tree, variable, &mut found);
    numbered_nodes::list_npus(tree, &mut found);
    numbered_nodes::list_hpus(tree, &mut found);
    numbered_nodes::list_neuron_cores(tree, variable, &mut found);
    found.accelerators.truncate(MAX_ACCELERATORS);
    let select_other = |name: String| {
        UNSUPPORTED_DEVICE_PREFIXES.iter().any(|prefix| is_unsupported_device(&name, prefix)).then_some(name)
    };
    found.has_other_devices = !tree.select_entries("dev", select_other).is_empty();
    found
}

/// Returns whether `name`, a device node with the driver's prefix `prefix`, belongs to an
/// accelerator that launch cannot assign to workers. The directory `accel` holds nodes of kinds
/// that launch knows.
fn is_unsupported_device(name: &str, prefix: &str) -> bool {
    let number = name.strip_prefix(prefix);
    number.is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()) && !(n.is_empty() && prefix == "accel"))
}

/// Parses the variable `LAUNCH_GPUS`, by which a test simulates accelerators that the machine does
/// not have, such as `cuda:2,xpu:1`. The text is a number, a kind and a number such as `npu:4`, or
/// several of them as in `cuda:2,xpu:1`. At most [`MAX_ACCELERATORS`] are returned. Returns `None`
/// if `text` is absent or malformed.
pub(super) fn parse_simulated_accelerators(text: Option<&str>) -> Option<Vec<Accelerator>> {
    let mut accelerators = Vec::new();
    for part in text?.split(',') {
        let (name, count) = part.split_once(':').unwrap_or(("cuda", part));
        let kind = AcceleratorKind::ALL.into_iter().find(|k| k.traits().name == name)?;
        let accelerator = |index: u32| Accelerator {
            uuid: (kind == AcceleratorKind::Mig).then(|| format!("MIG-{index}")),
            number: matches!(kind, AcceleratorKind::Hpu | AcceleratorKind::Neuron).then_some(index),
            ..Accelerator::new(kind)
        };
        let most = (MAX_ACCELERATORS - accelerators.len()) as u32;
        accelerators.extend((0..count.parse::<u32>().ok()?.min(most)).map(accelerator));
    }
    Some(accelerators)
}

/// Returns whether file permissions and the device rules of the control group allow this process to
/// open the device node `node` of an accelerator. The kernel also checks the control group, and the
/// driver does not notice the check.
fn is_device_permitted(node: &Path) -> bool {
    access(node, AccessFlags::R_OK | AccessFlags::W_OK).is_ok()
        // The nodes of MIG capabilities are not writable.
        || node.parent().is_some_and(|dir| dir.ends_with("nvidia-caps")) && access(node, AccessFlags::R_OK).is_ok()
}
