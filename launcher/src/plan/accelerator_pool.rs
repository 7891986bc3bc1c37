//! Defines [`AcceleratorPool`], the accelerators of one kind on a host, with their names in a
//! variable such as `CUDA_VISIBLE_DEVICES`.
use super::key_error::key_error;
use diagnostic::{Diagnostic, codes::host as codes};
use jobspec::{
    AcceleratorKind, DeviceSelection,
    env::{CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES},
};
use protocol::{control::HostInventory, hardware::Accelerator};
use std::collections::BTreeSet;

/// The largest number of devices that are read from the value of a variable such as
/// `CUDA_VISIBLE_DEVICES`. Further entries are ignored.
const MAX_LISTED_DEVICES: usize = 1024;

/// The accelerators of one kind, such as NVIDIA GPUs, on a host, in the order in which programs
/// number them by default.
pub(super) struct AcceleratorPool<'a> {
    kind: AcceleratorKind,
    accelerators: Vec<&'a Accelerator>,
    inventory: &'a HostInventory,
}

impl<'a> AcceleratorPool<'a> {
    /// Creates the pool of a host's accelerators of the kind `kind`, such as NVIDIA GPUs. For GPUs
    /// of AMD, the pool contains only those in `ROCR_VISIBLE_DEVICES`, because programs number
    /// these GPUs from 0.
    pub(super) fn new(kind: AcceleratorKind, inventory: &'a HostInventory) -> AcceleratorPool<'a> {
        let of_kind = inventory.accelerators.iter().filter(|a| a.kind == kind).collect();
        let pool = AcceleratorPool { kind, accelerators: of_kind, inventory };
        match find_variable(inventory, ROCR_VISIBLE_DEVICES).filter(|list| !list.is_empty()) {
            Some(list) if kind == AcceleratorKind::Rocm => {
                let entries = parse_device_list(list);
                let found = entries.iter().map_while(|name| pool.find_accelerator(name)).collect();
                AcceleratorPool { accelerators: found, ..pool }
            }
            _ => pool,
        }
    }

    /// Returns the numbers or UUIDs of all accelerators of the pool, by which a variable such as
    /// `CUDA_VISIBLE_DEVICES` selects them. An accelerator whose name is unknown has its position
    /// as a placeholder.
    pub(super) fn names(&self) -> Vec<String> {
        let name = |index: usize| self.name_of_index(index).unwrap_or_else(|| index.to_string());
        (0..self.accelerators.len()).map(name).collect()
    }

    /// Returns whether some accelerator of the pool cannot be selected by a variable such as
    /// `CUDA_VISIBLE_DEVICES`, because its number or UUID is unknown.
    pub(super) fn has_unnamed_accelerator(&self) -> bool {
        (0..self.accelerators.len()).any(|index| self.name_of_index(index).is_none())
    }

    /// Returns the number or UUID that selects the accelerator at position `index` of this pool in
    /// a variable such as `CUDA_VISIBLE_DEVICES`; `None` if it is unknown.
    fn name_of_index(&self, index: usize) -> Option<String> {
        let accelerator = self.accelerators[index];
        match self.kind {
            AcceleratorKind::Mig => accelerator.uuid.clone(),
            AcceleratorKind::Hpu | AcceleratorKind::Neuron => accelerator.number.map(|n| n.to_string()),
            _ => Some(index.to_string()),
        }
    }

    /// Converts the numbers of accelerators on their host to the names (numbers or UUIDs) that a
    /// variable such as `CUDA_VISIBLE_DEVICES` contains. Fails if there is no such accelerator,
    /// unless the accelerators of the host are `unknown`.
    pub(super) fn list_names_of_numbers(
        &self,
        numbers: &[u32],
        unknown: bool,
    ) -> diagnostic::Result<Vec<String>> {
        if unknown {
            return Ok(numbers.iter().map(u32::to_string).collect());
        }
        let names = self.names();
        let name = |n: &u32| names.get(*n as usize).cloned().ok_or_else(|| self.unknown_number_error(*n));
        numbers.iter().map(name).collect()
    }

    /// Returns the numbers or UUIDs of the accelerators in the host's own value of a variable such
    /// as `CUDA_VISIBLE_DEVICES`, without duplicates. Like the runtimes, ignores the first invalid
    /// entry and everything after it. Returns `None` if no variable restricts the accelerators.
    pub(super) fn names_in_host_environment(&self) -> Option<Vec<String>> {
        let variable = |name: &str| find_variable(self.inventory, name);
        let list = match self.kind {
            // An empty list hides all devices from CUDA, but restricts no other runtime.
            AcceleratorKind::Cuda | AcceleratorKind::Mig => variable(CUDA_VISIBLE_DEVICES)?,
            AcceleratorKind::Rocm => [HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES]
                .into_iter()
                .find_map(|name| variable(name).filter(|list| !list.is_empty()))?,
            kind => variable(kind.traits().variable).filter(|list| !list.is_empty())?,
        };
        let entries = match self.kind {
            AcceleratorKind::Neuron => parse_number_ranges(list),
            _ => parse_device_list(list),
        };
        let is_present = |name: &String| {
            // UUIDs may be unknown, and without an inventory every entry may be right. A number
            // never means a MIG instance, but a GPU that is not partitioned.
            let is_checked = !self.accelerators.is_empty() && self.kind != AcceleratorKind::Mig;
            !is_checked || name.parse::<u32>().is_err() || self.find_accelerator(name).is_some()
        };
        let mut seen = BTreeSet::new();
        let present = entries.into_iter().take_while(is_present);
        Some(present.filter(|name| seen.insert(name.clone())).collect())
    }

    /// Returns the accelerator of the pool that the text `name` denotes, which is a number or the
    /// beginning of a UUID.
    fn find_accelerator(&self, name: &str) -> Option<&'a Accelerator> {
        // Level Zero writes the tile T of the GPU G as `G.T`.
        let number = name.split_once('.').map_or(name, |(gpu, _)| gpu).parse::<u32>().ok();
        let is_numbered = matches!(self.kind, AcceleratorKind::Hpu | AcceleratorKind::Neuron);
        let by_number = |number: u32| match self.kind {
            AcceleratorKind::Mig => None,
            _ if is_numbered && !self.has_unnamed_accelerator() => {
                self.accelerators.iter().find(|a| a.number == Some(number))
            }
            _ => self.accelerators.get(number as usize),
        };
        let has_uuid = |a: &&&Accelerator| a.uuid.as_deref().is_some_and(|u| u.starts_with(name));
        number.map_or_else(|| self.accelerators.iter().find(has_uuid), by_number).copied()
    }

    /// Returns the NUMA node of the accelerator with the name `name`, which is its number or UUID.
    /// Returns `None` if the node or the accelerator is unknown.
    pub(super) fn find_numa_node(&self, name: &str) -> Option<u32> {
        self.find_accelerator(name)?.numa_node
    }

    /// Creates the error that the host has no accelerator with the number `number`, which the job
    /// selects.
    fn unknown_number_error(&self, number: u32) -> Diagnostic {
        let (host, unit) = (&self.inventory.host, self.kind.traits().unit);
        let message = format!("there is no {unit} {number} on {host}: {}", self.describe());
        key_error(codes::GPU_INDEX_UNKNOWN, "cluster.devices", message)
            .with_field("host", host.as_str())
            .with_field("gpu", number)
            .with_field("gpus", self.accelerators.len())
            .with_help(format!("{unit}s count from 0"))
    }

    /// Creates the error that the host has no accelerator of the kind that the value `devices` of
    /// the job.yaml key `cluster.devices` requires.
    pub(super) fn no_accelerator_error(&self, devices: &DeviceSelection) -> Diagnostic {
        let (host, traits) = (&self.inventory.host, self.kind.traits());
        let value = if *devices == DeviceSelection::Cuda { "cuda" } else { traits.name };
        let denied = match self.inventory.denied_accelerators {
            0 => String::new(),
            n => format!(" (permissions or a control group deny {n} to launch)"),
        };
        let message = format!(
            "`cluster.devices: {value}` requires {} on {host}, but {}{denied}",
            traits.one,
            self.describe()
        );
        key_error(codes::GPU_REQUIRED, "cluster.devices", message)
            .with_field("host", host.as_str())
            .with_help(format!("check the driver with `{}`", traits.tool))
    }

    /// Describes the accelerators of the host for an error message, such as `the host has GPUs 0 to
    /// 3`.
    fn describe(&self) -> String {
        let unit = self.kind.traits().unit;
        match self.accelerators.len() {
            0 => format!("no {unit} was found"),
            1 => format!("the host has {unit} 0"),
            n => format!("the host has {unit}s 0 to {}", n - 1),
        }
    }
}

/// Returns the value of the environment variable `name` on a host; `None` if the variable is not
/// set.
fn find_variable<'a>(inventory: &'a HostInventory, name: &str) -> Option<&'a str> {
    inventory.inherited_env.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
}

/// Splits the value of a variable such as `CUDA_VISIBLE_DEVICES` into its entries, which are
/// numbers or UUIDs. Like CUDA, ignores the first invalid entry and everything after it.
fn parse_device_list(list: &str) -> Vec<String> {
    let entries = list.split(',').map(str::trim).take(MAX_LISTED_DEVICES);
    entries.take_while(|entry| !entry.is_empty() && !entry.starts_with('-')).map(str::to_owned).collect()
}

/// Parses a list of numbers and ranges such as `0-3,8`, as in `NEURON_RT_VISIBLE_CORES`. Ignores
/// the first invalid entry and everything after it.
fn parse_number_ranges(list: &str) -> Vec<String> {
    let mut numbers = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
        let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>()) else { break };
        numbers.extend((first..=last).take(MAX_LISTED_DEVICES - numbers.len()).map(|n| n.to_string()));
    }
    numbers
}
