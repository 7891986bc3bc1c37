//! [`GpuFault`]: an error of a GPU with its Xid number, as NVIDIA's driver has reported it in the
//! kernel log.
use serde::{Deserialize, Serialize};

/// An error of a GPU that NVIDIA's driver reported in the kernel log. NVIDIA calls such errors Xid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error(
    "NVIDIA's driver reported Xid {xid}{} on the GPU at {pci_address}",
    .description.as_ref().map_or_else(String::new, |text| format!(" ({text})"))
)]
pub struct GpuFault {
    /// The number of the error in NVIDIA's list of Xid errors.
    pub xid: u32,
    /// The GPU's address on the PCI bus, such as `0000:17:00`.
    pub pci_address: String,
    /// The meaning of the error number; `None` if this program does not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}
