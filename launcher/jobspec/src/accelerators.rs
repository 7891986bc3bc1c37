//! [`AcceleratorKind`]: the kinds of accelerators, with the environment variables that select them.
use crate::env;
use serde::{Deserialize, Serialize};

/// A kind of accelerator, that is, of a device that computes for a worker. The kind decides the
/// environment variable that selects devices, and the files by which launch finds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum AcceleratorKind {
    /// A GPU of NVIDIA.
    #[default]
    #[serde(rename = "Nvidia")]
    Cuda,
    /// An instance of a GPU of NVIDIA that is partitioned (MIG).
    Mig,
    /// A GPU of AMD.
    #[serde(rename = "Amd")]
    Rocm,
    /// A GPU of Intel, or one of its tiles.
    Xpu,
    /// An Ascend NPU of Huawei.
    Npu,
    /// A Gaudi accelerator of Intel.
    Hpu,
    /// A NeuronCore of AWS Trainium or Inferentia.
    Neuron,
}

/// The properties of a kind of accelerator, such as NVIDIA's GPUs: its names for users, and the
/// environment variables of its runtime.
#[derive(Debug)]
pub struct AcceleratorTraits {
    /// The name of the kind in job.yaml, in the torch device and in `launch plan`, e.g. `npu`.
    pub name: &'static str,
    /// The name of the vendor or product.
    pub vendor: &'static str,
    /// The noun for one accelerator of this kind, e.g. `NPU`.
    pub unit: &'static str,
    /// The noun with its article, e.g. `an NPU`.
    pub one: &'static str,
    /// The environment variable that lists the accelerators that a process can use.
    pub variable: &'static str,
    /// The variable and the value with which a process sees no accelerator of this kind; `None` if
    /// the vendor documents no such value.
    pub hide: Option<(&'static str, &'static str)>,
    /// The pattern of the device nodes, in which `N` stands for a number.
    pub nodes: &'static str,
    /// The command of the vendor that lists the accelerators.
    pub tool: &'static str,
}

/// The properties of all kinds of accelerators, in the order of [`AcceleratorKind::ALL`].
const ACCELERATOR_KIND_TRAITS: [AcceleratorTraits; 7] = [
    AcceleratorTraits {
        name: "cuda",
        vendor: "NVIDIA",
        unit: "GPU",
        one: "a GPU",
        variable: env::CUDA_VISIBLE_DEVICES,
        hide: Some((env::CUDA_VISIBLE_DEVICES, "")),
        nodes: "/dev/nvidiaN",
        tool: "nvidia-smi",
    },
    AcceleratorTraits {
        name: "mig",
        vendor: "NVIDIA",
        unit: "MIG instance",
        one: "a MIG instance",
        variable: env::CUDA_VISIBLE_DEVICES,
        hide: Some((env::CUDA_VISIBLE_DEVICES, "")),
        nodes: "/dev/nvidia-caps/nvidia-capN",
        tool: "nvidia-smi -L",
    },
    AcceleratorTraits {
        name: "rocm",
        vendor: "AMD",
        unit: "GPU",
        one: "a GPU",
        variable: env::HIP_VISIBLE_DEVICES,
        // HIP takes an empty list for a variable that is not set.
        hide: Some((env::HIP_VISIBLE_DEVICES, "-1")),
        nodes: "/dev/dri/renderDN",
        tool: "rocm-smi",
    },
    AcceleratorTraits {
        name: "xpu",
        vendor: "Intel",
        unit: "XPU",
        one: "an XPU",
        variable: env::ZE_AFFINITY_MASK,
        hide: Some((env::ONEAPI_DEVICE_SELECTOR, "*:cpu")),
        nodes: "/dev/dri/renderDN",
        tool: "xpu-smi discovery",
    },
    AcceleratorTraits {
        name: "npu",
        vendor: "Ascend",
        unit: "NPU",
        one: "an NPU",
        variable: env::ASCEND_RT_VISIBLE_DEVICES,
        hide: None,
        nodes: "/dev/davinciN",
        tool: "npu-smi info",
    },
    AcceleratorTraits {
        name: "hpu",
        vendor: "Gaudi",
        unit: "HPU",
        one: "an HPU",
        variable: env::HABANA_VISIBLE_MODULES,
        hide: None,
        nodes: "/dev/accel/accelN",
        tool: "hl-smi",
    },
    AcceleratorTraits {
        name: "neuron",
        vendor: "AWS",
        unit: "NeuronCore",
        one: "a NeuronCore",
        variable: env::NEURON_RT_VISIBLE_CORES,
        hide: None,
        nodes: "/dev/neuronN",
        tool: "neuron-ls",
    },
];

impl AcceleratorKind {
    /// All kinds of accelerators.
    pub const ALL: [AcceleratorKind; 7] =
        [Self::Cuda, Self::Mig, Self::Rocm, Self::Xpu, Self::Npu, Self::Hpu, Self::Neuron];

    /// Returns the properties of this kind of accelerator, such as the environment variable that
    /// selects accelerators.
    pub const fn traits(self) -> &'static AcceleratorTraits {
        &ACCELERATOR_KIND_TRAITS[self as usize]
    }

    /// Returns whether programs use accelerators of this kind as CUDA devices
    /// (`torch.device("cuda")`). torch also calls the GPUs of AMD CUDA devices.
    pub const fn is_cuda_device(self) -> bool {
        matches!(self, Self::Cuda | Self::Mig | Self::Rocm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that each kind has a different name, and that launch reports every variable that
    /// selects devices.
    #[test]
    fn names_differ_and_variables_belong_to_the_inventory() {
        let mut names: Vec<_> = AcceleratorKind::ALL.iter().map(|kind| kind.traits().name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), AcceleratorKind::ALL.len());
        for (index, kind) in AcceleratorKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
            assert!(env::is_device_variable(kind.traits().variable), "{kind:?}");
        }
    }
}
