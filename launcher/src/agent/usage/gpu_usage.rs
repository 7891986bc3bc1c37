//! [`GpuUsageReader`]: reads the utilization and memory use of this host's GPUs, from NVIDIA's
//! library or AMD's driver.
use crate::agent::probe::nvml::{NVML_LIBRARY, Nvml};
use protocol::control::GpuUsage;
use std::{fs, path::Path};

/// The path, relative to `/`, of the directory in sysfs in which the kernel lists graphics devices.
const DRM_DIRECTORY: &str = "sys/class/drm";
/// The prefix of the names of DRM render nodes, which are the device files through which programs
/// compute on GPUs.
const RENDER_NODE_PREFIX: &str = "renderD";
/// The largest number of AMD GPUs whose usage is read.
const MAX_GPUS: usize = 64;

/// Reads the current usage of the host's NVIDIA and AMD GPUs.
#[derive(Default)]
pub(super) struct GpuUsageReader {
    is_opened: bool,
    /// `None` if the library is missing.
    nvml: Option<Nvml>,
}

impl GpuUsageReader {
    /// Reads the current utilization and memory use of each GPU of this host. Reads files below
    /// `root`.
    pub(super) fn read_usage(&mut self, root: &Path) -> Vec<GpuUsage> {
        if !self.is_opened {
            (self.is_opened, self.nvml) = (true, Nvml::open(NVML_LIBRARY).ok());
        }
        match &self.nvml {
            Some(nvml) => nvml.query_usage(),
            None => read_amd_usage(root),
        }
    }
}

/// Reads the usage of AMD GPUs from the files of their driver in sysfs.
fn read_amd_usage(root: &Path) -> Vec<GpuUsage> {
    let entries = fs::read_dir(root.join(DRM_DIRECTORY)).into_iter().flatten().flatten();
    let parse_node = |name: &str| name.strip_prefix(RENDER_NODE_PREFIX)?.parse::<u32>().ok();
    let mut numbers: Vec<u32> = entries.filter_map(|e| parse_node(e.file_name().to_str()?)).collect();
    numbers.sort_unstable();
    let read = |number: u32| {
        let directory = root.join(format!("{DRM_DIRECTORY}/{RENDER_NODE_PREFIX}{number}/device"));
        let value = |name: &str| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
        let total = value("mem_info_vram_total")?;
        Some(GpuUsage {
            busy_share: value("gpu_busy_percent").map(|percent| percent.min(100) as f64 / 100.0),
            memory_used: value("mem_info_vram_used"),
            memory_total: Some(total),
            ..GpuUsage::default()
        })
    };
    let gpus = numbers.into_iter().filter_map(read).take(MAX_GPUS);
    gpus.zip(0..).map(|(usage, gpu)| GpuUsage { gpu, ..usage }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_amd_are_read_in_order_and_other_devices_are_skipped() {
        let root = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            let path = root.path().join(DRM_DIRECTORY).join(name);
            fs::create_dir_all(path.parent().expect("parent")).expect("directory");
            fs::write(path, text).expect("file");
        };
        for (number, busy) in [(130, "7"), (128, "93")] {
            write(&format!("{RENDER_NODE_PREFIX}{number}/device/mem_info_vram_total"), "1000\n");
            write(&format!("{RENDER_NODE_PREFIX}{number}/device/mem_info_vram_used"), "600\n");
            write(&format!("{RENDER_NODE_PREFIX}{number}/device/gpu_busy_percent"), busy);
        }
        write("renderD129/device/vendor", "0x1a03\n");
        write("version", "drm 1.1.0\n");
        let usage = read_amd_usage(root.path());
        let shares: Vec<_> = usage.iter().map(|gpu| (gpu.gpu, gpu.busy_share, gpu.memory_used)).collect();
        assert_eq!(shares, [(0, Some(0.93), Some(600)), (1, Some(0.07), Some(600))]);
        assert_eq!(read_amd_usage(Path::new("/nonexistent")), []);
    }
}
