//! [`AcceleratorSelection`]: the accelerators that the workers of a host can use.
use super::{accelerator_pool::AcceleratorPool, job_host::JobHost, key_error::key_error};
use diagnostic::{Diagnostic, codes::host as codes, quantity::format_count};
use jobspec::{
    AcceleratorKind, DeviceSelection, JobSpec, VisibleDevices,
    env::{CUDA_DEVICE_ORDER, CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES},
};
use protocol::{control::HostInventory, hardware::list_accelerator_kinds};

/// The accelerators of one host that a job uses, with the settings by which they are divided among
/// the workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AcceleratorSelection {
    /// The kind of the accelerators.
    kind: AcceleratorKind,
    /// The numbers or UUIDs of the accelerators, as in the environment variable of their kind. No
    /// item is empty.
    names: Vec<String>,
    /// The NUMA node of each accelerator in `names`; `None` if unknown.
    numa_nodes: Vec<Option<u32>>,
    /// Whether programs get the variable even if they may use all accelerators that launch itself
    /// can use.
    set_always: bool,
    /// Whether `names` are GPU numbers in the order of the PCI bus. Otherwise they come from the
    /// user's environment.
    in_bus_order: bool,
    /// Whether `names` are only placeholders, because the driver does not state the names.
    unnamed: bool,
    /// The kinds of which programs must not see any accelerator.
    hidden: Vec<AcceleratorKind>,
    /// The kinds of accelerators of the host, if there are several and the job does not choose one.
    /// Then `names` is empty.
    mixed: Vec<AcceleratorKind>,
    /// Whether the host has devices whose kind launch cannot select.
    has_other_devices: bool,
    /// Whether the host's agent has not reported the accelerators yet.
    unknown: bool,
    /// The number of built-in workers that share a GPU; 0 if the workers run a program. A built-in
    /// worker sees only its own GPU.
    workers_per_gpu: u32,
}

/// Selects the accelerators that the job uses on a host. Fails if the host does not have the
/// accelerators that the job requires.
pub(super) fn select_accelerators(
    job: &JobSpec,
    inventory: &HostInventory,
) -> diagnostic::Result<AcceleratorSelection> {
    let unknown = inventory.is_unknown();
    let trains = job.run.command.is_none();
    let devices = &job.cluster.devices;
    let has_other_devices = inventory.has_other_devices;
    if trains && !job.cluster.trains_on_gpus() {
        return Ok(AcceleratorSelection { has_other_devices, ..AcceleratorSelection::default() });
    }
    if *devices == DeviceSelection::Cpu {
        return build_hidden_selection(inventory);
    }
    let kinds = list_usable_kinds(inventory, trains);
    let Some(kind) = choose_kind(devices, &kinds, inventory) else {
        let mixed = kinds;
        if matches!(devices, DeviceSelection::List(_)) {
            return Err(mixed_kinds_error(&mixed, inventory));
        }
        return Ok(AcceleratorSelection { mixed, has_other_devices, ..AcceleratorSelection::default() });
    };
    let pool = AcceleratorPool::new(kind, inventory);
    let inherited = pool.names_in_host_environment();
    let in_bus_order = inherited.is_none() || matches!(devices, DeviceSelection::List(_));
    let (names, set_always) = match devices {
        DeviceSelection::List(listed) => (pool.list_names_of_numbers(listed, unknown)?, true),
        _ => (inherited.unwrap_or_else(|| pool.names()), false),
    };
    let is_required = matches!(devices, DeviceSelection::Cuda | DeviceSelection::Kind(_));
    if names.is_empty() && is_required && !unknown {
        return Err(pool.no_accelerator_error(devices));
    }
    let numa_nodes = names.iter().map(|name| pool.find_numa_node(name)).collect();
    let workers_per_gpu = if trains { job.cluster.workers_per_gpu } else { 0 };
    let unnamed = in_bus_order && pool.has_unnamed_accelerator();
    Ok(AcceleratorSelection {
        kind,
        names,
        numa_nodes,
        set_always,
        in_bus_order,
        unnamed,
        has_other_devices,
        unknown,
        workers_per_gpu,
        ..AcceleratorSelection::default()
    })
}

/// Returns the selection for a job that uses only CPUs: no accelerators, and variables that hide
/// all accelerators of the host from programs. Fails if the host has accelerators that cannot be
/// hidden.
fn build_hidden_selection(inventory: &HostInventory) -> diagnostic::Result<AcceleratorSelection> {
    let kinds = list_accelerator_kinds(&inventory.accelerators);
    if let Some(traits) = kinds.iter().map(|kind| kind.traits()).find(|traits| traits.hide.is_none()) {
        let host = &inventory.host;
        let message =
            format!("launch cannot hide the {}s of {host} ({}) from programs", traits.unit, traits.vendor);
        return Err(key_error(codes::ACCELERATORS_NOT_HIDDEN, "cluster.devices", message)
            .with_field("host", host.as_str())
            .with_field("kind", traits.name)
            .with_help("use `auto`, and select the CPU in the program"));
    }
    // On a host without accelerators, programs get the variable of CUDA.
    let hidden = if kinds.is_empty() { vec![AcceleratorKind::Cuda] } else { kinds };
    Ok(AcceleratorSelection { hidden, ..AcceleratorSelection::default() })
}

/// Returns those kinds of accelerators on a host, such as NVIDIA GPUs, among which the kind for the
/// job is chosen.
///
/// The built-in training uses only GPUs of NVIDIA. On a host with GPUs of NVIDIA, those of AMD are
/// often graphics that are integrated in the CPU, so that they count only if a variable of AMD
/// lists devices and no variable of NVIDIA does.
fn list_usable_kinds(inventory: &HostInventory, trains: bool) -> Vec<AcceleratorKind> {
    let is_nvidia = |kind: &AcceleratorKind| matches!(kind, AcceleratorKind::Cuda | AcceleratorKind::Mig);
    let is_set = |names: &[&str]| {
        inventory.inherited_env.iter().any(|(n, v)| names.contains(&n.as_str()) && !v.is_empty())
    };
    let mut kinds = list_accelerator_kinds(&inventory.accelerators);
    if !kinds.iter().any(is_nvidia) {
        return kinds;
    }
    let prefers_amd =
        is_set(&[HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES]) && !is_set(&[CUDA_VISIBLE_DEVICES]);
    match prefers_amd && !trains && kinds.contains(&AcceleratorKind::Rocm) {
        true => kinds.retain(|kind| !is_nvidia(kind)),
        false => kinds.retain(|kind| if trains { is_nvidia(kind) } else { *kind != AcceleratorKind::Rocm }),
    }
    kinds
}

/// Chooses the kind of accelerators (such as NVIDIA GPUs) that a job uses on a host, from `kinds`,
/// the kinds of accelerators on this host. If there are several, the job or an environment variable
/// that lists devices of one kind decides. Returns `None` if nothing decides.
fn choose_kind(
    devices: &DeviceSelection,
    kinds: &[AcceleratorKind],
    inventory: &HostInventory,
) -> Option<AcceleratorKind> {
    let is_listed = |kind: AcceleratorKind| {
        AcceleratorPool::new(kind, inventory).names_in_host_environment().is_some_and(|n| !n.is_empty())
    };
    let without_inventory = || {
        let has_rocm_variable =
            inventory.inherited_env.iter().any(|(n, v)| n == HIP_VISIBLE_DEVICES && !v.is_empty());
        if has_rocm_variable { AcceleratorKind::Rocm } else { AcceleratorKind::Cuda }
    };
    match devices {
        DeviceSelection::Kind(kind) => Some(*kind),
        DeviceSelection::Cuda => {
            Some(kinds.iter().copied().find(|kind| kind.is_cuda_device()).unwrap_or_else(without_inventory))
        }
        DeviceSelection::Auto | DeviceSelection::List(_) | DeviceSelection::Cpu => match *kinds {
            [] => Some(without_inventory()),
            [kind] => Some(kind),
            _ => {
                let mut listed = kinds.iter().copied().filter(|kind| is_listed(*kind));
                listed.next().filter(|_| listed.next().is_none())
            }
        },
    }
}

/// Creates the error that a host has accelerators of several kinds (such as GPUs of two vendors)
/// and the job does not choose one.
fn mixed_kinds_error(kinds: &[AcceleratorKind], inventory: &HostInventory) -> Diagnostic {
    let host = &inventory.host;
    let describe = |kind: &AcceleratorKind| {
        let count = inventory.accelerators.iter().filter(|a| a.kind == *kind).count();
        let traits = kind.traits();
        format!("{} ({})", format_count(count, traits.unit), traits.vendor)
    };
    let found: Vec<String> = kinds.iter().map(describe).collect();
    let message = format!("{host} has accelerators of several kinds: {}", found.join(", "));
    let name = |kind: &AcceleratorKind| match kind {
        AcceleratorKind::Cuda | AcceleratorKind::Mig => "cuda",
        kind => kind.traits().name,
    };
    let mut names: Vec<&str> = kinds.iter().map(name).collect();
    names.dedup();
    key_error(codes::ACCELERATORS_MIXED, "cluster.devices", message)
        .with_field("host", host.as_str())
        .with_field("kinds", names.as_slice())
        .with_help(format!("choose a kind: `cluster.devices: {}`", names.join("` or `")))
}

impl AcceleratorSelection {
    /// Keeps only the accelerators whose numbers (slots) a host filter of the user, such as
    /// `host:0,2`, selects. If no filter selects slots, keeps all. Fails if a slot is not the
    /// number of an accelerator, or if `cluster.devices` also lists numbers. If the job uses no
    /// accelerators on the host, fails unless the selected slots are 0, 1, 2 and so on without
    /// gaps.
    pub(super) fn retain_selected_slots(self, job: &JobSpec, host: &JobHost) -> diagnostic::Result<Self> {
        let Some(slots) = &host.selected_slots else { return Ok(self) };
        if !self.mixed.is_empty() {
            return Err(mixed_kinds_error(&self.mixed, &host.inventory));
        }
        let are_first = slots.iter().zip(0..).all(|(slot, index)| *slot == index);
        let key = if job.cluster.include.is_empty() { "cluster.exclude" } else { "cluster.include" };
        let reject = |code, reason: String, help: &str| {
            let message = format!("`{key}` selects slots {slots:?} of {}, {reason}", host.name);
            Err(key_error(code, key, message)
                .with_field("host", host.name.as_str())
                .with_field("slots", slots.as_slice())
                .with_help(help))
        };
        if matches!(job.cluster.devices, DeviceSelection::List(_)) {
            let reason = "but `cluster.devices` selects GPUs by number too".to_owned();
            return reject(codes::SLOTS_NOT_GPUS, reason, "use one of the two keys");
        }
        let uses_gpus = job.run.command.is_some() || self.workers_per_gpu > 0;
        if self.unknown && self.names.is_empty() && self.hidden.is_empty() && uses_gpus {
            let names = slots.iter().map(u32::to_string).collect();
            let numa_nodes = vec![None; slots.len()];
            return Ok(AcceleratorSelection { numa_nodes, names, set_always: true, ..self });
        }
        let unit = self.kind.traits().unit;
        match self.count() {
            // Slots of a host without accelerators are interchangeable, so only their number
            // counts.
            0 if are_first => Ok(self),
            0 => {
                let last = slots.len().saturating_sub(1);
                let reason = format!("which are {unit}s by number, but the job uses no {unit}s there");
                let help = format!("write `{}:0-{last}` for as many workers on CPUs", host.name);
                reject(codes::SLOTS_NOT_GPUS, reason, &help)
            }
            count => match slots.iter().find(|slot| **slot as usize >= count) {
                Some(absent) => {
                    let reason =
                        format!("but the host has no {unit} {absent} for the job ({unit}s: {count})");
                    reject(codes::GPU_INDEX_UNKNOWN, reason, "slots count from 0")
                }
                None => {
                    let index = |slot: &u32| *slot as usize;
                    let names = slots.iter().map(|slot| self.names[index(slot)].clone()).collect();
                    let numa_nodes = slots.iter().map(|slot| self.numa_nodes[index(slot)]).collect();
                    Ok(AcceleratorSelection { names, numa_nodes, set_always: true, ..self })
                }
            },
        }
    }

    /// Returns the number of accelerators that the job uses on the host.
    pub(super) fn count(&self) -> usize {
        self.names.len()
    }

    /// Returns the word for one accelerator of this kind, such as `GPU`, for messages.
    pub(super) fn unit_noun(&self) -> &'static str {
        self.kind.traits().unit
    }

    /// Returns whether programs on the host compute on CPUs, because the host has no accelerator or
    /// the job hides all accelerators from them.
    pub(super) fn computes_on_cpus(&self) -> bool {
        let sees_nothing = self.names.is_empty() && self.mixed.is_empty() && !self.has_other_devices;
        !self.hidden.is_empty() || sees_nothing && !self.unknown
    }

    /// Returns how many workers can use the selected accelerators of a host: the number of
    /// accelerators times the number of workers per accelerator.
    pub(super) fn worker_capacity(&self) -> usize {
        self.count() * self.workers_per_gpu.max(1) as usize
    }

    /// Returns which of the selected accelerators, counted from 0, the worker with the local rank
    /// `local_rank` uses.
    fn accelerator_index_of_worker(&self, local_rank: u32) -> usize {
        (local_rank / self.workers_per_gpu.max(1)) as usize
    }

    /// Returns the NUMA node of a worker's accelerator, or `None` if the node is unknown or the
    /// worker has no accelerator.
    pub(super) fn numa_node_of_worker(&self, local_rank: u32) -> Option<u32> {
        self.numa_nodes.get(self.accelerator_index_of_worker(local_rank)).copied().flatten()
    }

    /// Returns the name of the device that the worker with the local rank `local_rank` uses, such
    /// as `gpu 0`, `npu 0`, `cpu` or `unknown`.
    pub(super) fn device_label_of_worker(&self, local_rank: u32) -> String {
        let none = if self.unknown || !self.mixed.is_empty() { "unknown" } else { "cpu" };
        let kind = match self.kind {
            AcceleratorKind::Cuda | AcceleratorKind::Rocm => "gpu",
            kind => kind.traits().name,
        };
        self.names
            .get(self.accelerator_index_of_worker(local_rank))
            .map_or_else(|| none.to_owned(), |name| format!("{kind} {name}"))
    }

    /// Fails if `workers` workers need more accelerators than the host has, by the job's settings
    /// for sharing accelerators. Also fails if the workers cannot be assigned to them. Skips the
    /// check if no accelerator is selected because those of the host are not known yet.
    pub(super) fn check_worker_count(
        &self,
        job: &JobSpec,
        workers: u32,
        inventory: &HostInventory,
    ) -> diagnostic::Result<()> {
        let (count, host, traits) = (self.count(), &inventory.host, self.kind.traits());
        let too_few = self.worker_capacity() < workers as usize && !(self.unknown && count == 0);
        let sees_one = job.run.visible_devices == VisibleDevices::One;
        let reject = |code, key: &str, message: String, help: &str| {
            Err(key_error(code, key, message)
                .with_field("host", host.as_str())
                .with_field("workers", workers)
                .with_field("gpus", count)
                .with_help(help))
        };
        if sees_one && !self.mixed.is_empty() {
            return Err(mixed_kinds_error(&self.mixed, inventory));
        }
        if self.workers_per_gpu > 0 && too_few {
            let message = format!(
                "{workers} workers with {} per GPU need more than the {} of {host}",
                self.workers_per_gpu,
                format_count(count, traits.unit)
            );
            let help = "use fewer workers, or raise `cluster.workers_per_gpu`";
            return reject(codes::GPUS_TOO_FEW, "cluster.workers_per_host", message, help);
        }
        if sees_one && too_few {
            let message = format!("{workers} workers need {} each, but {host} has {count}", traits.one);
            return reject(
                codes::GPUS_TOO_FEW,
                "run.visible_devices",
                message,
                "use fewer workers, or `all`",
            );
        }
        // Workers may share GPUs of NVIDIA, as with MPS. A warning reports that.
        if matches!(job.cluster.devices, DeviceSelection::Kind(_)) && too_few {
            let available = format_count(count, traits.unit);
            let message = format!("the job places {workers} workers on {host}, which has {available}");
            let help = "use fewer workers, or `cluster.devices: auto` if workers share them";
            return reject(codes::GPUS_TOO_FEW, "cluster.workers_per_host", message, help);
        }
        let is_assigned = sees_one || self.set_always || self.workers_per_gpu > 0;
        if self.unnamed && is_assigned {
            let message =
                format!("the names of the {}s of {host} for {} are unknown", traits.unit, traits.variable);
            let help = format!("check `{}` on the host", traits.tool);
            return reject(codes::ACCELERATORS_UNNAMED, "cluster.devices", message, &help);
        }
        let are_instances = self.kind == AcceleratorKind::Mig
            && (self.in_bus_order || self.names.iter().any(|n| n.starts_with("MIG-")));
        if are_instances && workers > 1 && !sees_one && self.workers_per_gpu == 0 {
            let message = format!("{workers} workers on {host} would all use its first MIG instance");
            let help = "a process uses one instance: set `run.visible_devices: one`";
            return reject(codes::MIG_INSTANCES_SHARED, "run.visible_devices", message, help);
        }
        Ok(())
    }

    /// Returns a warning if several workers of the user's program must share an accelerator because
    /// the host has fewer accelerators than workers.
    pub(super) fn find_shared_warning(&self, host: &str, workers: u32) -> Option<Diagnostic> {
        let count = self.count();
        if self.workers_per_gpu > 0 || count == 0 || workers as usize <= count {
            return None;
        }
        let available = format_count(count, self.unit_noun());
        let message = format!("{workers} workers on {host} have {available}");
        let warning = Diagnostic::warning(codes::ACCELERATORS_SHARED, message)
            .with_subject("cluster.workers_per_host")
            .with_field("host", host)
            .with_field("workers", workers)
            .with_field("gpus", count);
        Some(warning.with_help("use at most one worker for each, unless the program shares them"))
    }

    /// Fails if the host has accelerators of several kinds, such as GPUs of two vendors, and
    /// neither the job nor the environment selects one kind.
    pub(super) fn check_single_kind(&self, inventory: &HostInventory) -> diagnostic::Result<()> {
        if self.mixed.is_empty() { Ok(()) } else { Err(mixed_kinds_error(&self.mixed, inventory)) }
    }

    /// Returns the environment variables, such as `CUDA_VISIBLE_DEVICES`, that make a worker see
    /// only the accelerators that are meant for it. The list is empty if the worker inherits the
    /// accelerators of its agent. Built-in workers always get one GPU, so `policy` only applies to
    /// programs.
    pub(super) fn build_env(&self, policy: VisibleDevices, local_rank: u32) -> Vec<(&'static str, String)> {
        if !self.hidden.is_empty() {
            let mut env = vec![(CUDA_VISIBLE_DEVICES, String::new())];
            let variables = self.hidden.iter().filter_map(|kind| kind.traits().hide);
            let others = variables.filter(|(name, _)| *name != CUDA_VISIBLE_DEVICES);
            env.extend(others.map(|(name, value)| (name, value.to_owned())));
            return env;
        }
        let policy = if self.workers_per_gpu > 0 { VisibleDevices::One } else { policy };
        let visible = match (policy, self.names.get(self.accelerator_index_of_worker(local_rank))) {
            (VisibleDevices::One, Some(name)) => name.clone(),
            _ if self.set_always => self.names.join(","),
            _ => return Vec::new(),
        };
        match self.kind {
            AcceleratorKind::Cuda if self.in_bus_order && !visible.is_empty() => {
                // By default CUDA numbers the fastest GPU first.
                vec![(CUDA_VISIBLE_DEVICES, visible), (CUDA_DEVICE_ORDER, "PCI_BUS_ID".to_owned())]
            }
            // Programs for ROCm also read CUDA's variable, which torchrun sets for them.
            AcceleratorKind::Rocm => {
                vec![(CUDA_VISIBLE_DEVICES, visible.clone()), (HIP_VISIBLE_DEVICES, visible)]
            }
            kind => vec![(kind.traits().variable, visible)],
        }
    }

    /// Returns which of its visible GPUs a worker that runs JAX is to use, as a number from 0.
    /// Returns `None` if the process is to use all of them: if it is the only one of its host, sees
    /// a single GPU, or has no GPU for itself.
    pub(super) fn jax_device_of_worker(
        &self,
        policy: VisibleDevices,
        local_rank: u32,
        workers: u32,
    ) -> Option<u32> {
        let is_gpu = matches!(self.kind, AcceleratorKind::Cuda | AcceleratorKind::Rocm);
        let has_own = workers > 1 && workers as usize <= self.count();
        (is_gpu && has_own && policy == VisibleDevices::All).then_some(local_rank)
    }
}

#[cfg(test)]
#[path = "accelerator_selection_tests.rs"]
mod tests;
