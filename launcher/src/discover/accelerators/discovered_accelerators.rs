//! [`DiscoveredAccelerators`]: the accelerators of a machine that discovery has found.
use protocol::hardware::Accelerator;

/// The accelerators of a machine that this process may use, and the number of accelerators that the
/// process may not use.
#[derive(Debug, Default, PartialEq)]
pub(in crate::discover) struct DiscoveredAccelerators {
    /// The accelerators that this process may use. Those of one kind are in the order in which
    /// their runtime numbers them.
    pub(in crate::discover) accelerators: Vec<Accelerator>,
    /// The number of accelerators that permissions or a control group deny to this process.
    pub(in crate::discover) denied: u32,
    /// Whether there are devices whose kind launch cannot select.
    pub(in crate::discover) has_other_devices: bool,
}
