//! [`GpuSelection`]: the GPUs that the workers of a host can use.
use super::{job_host::JobHost, key_error::key_error};
use diagnostic::{Diagnostic, codes::host as codes, quantity::format_count};
use jobspec::{
    DeviceSelection, JobSpec, VisibleDevices,
    env::{CUDA_DEVICE_ORDER, CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES},
};
use protocol::{control::HostInventory, hardware::GpuVendor};

/// The GPUs that a job uses on one host, in the order in which a program numbers them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GpuSelection {
    /// The numbers or UUIDs of the GPUs, as in `CUDA_VISIBLE_DEVICES`. No item is empty.
    names: Vec<String>,
    /// The NUMA node of each GPU in `names`; `None` if unknown.
    numa_nodes: Vec<Option<u32>>,
    /// The name of the environment variable that selects GPUs on this host.
    variable: &'static str,
    /// Whether programs get the variable even if they may use all GPUs that launch itself can use.
    set_always: bool,
    /// Whether `names` are GPU numbers in the order of the PCI bus. Otherwise they come from the
    /// user's environment.
    in_bus_order: bool,
    /// Whether programs must not see any GPU.
    hidden: bool,
    /// Whether the host's agent has not reported the GPUs yet.
    unknown: bool,
    /// The number of built-in workers that share a GPU; 0 if the workers run a program. A built-in
    /// worker sees only its own GPU.
    workers_per_gpu: u32,
}

/// Selects the GPUs that the job uses on a host. Fails if the host does not have the GPUs that the
/// job requires.
pub(super) fn select_gpus(job: &JobSpec, inventory: &HostInventory) -> diagnostic::Result<GpuSelection> {
    let inherited =
        |name: &str| inventory.inherited_env.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
    let unknown = inventory.is_unknown();
    let is_rocm = inherited(HIP_VISIBLE_DEVICES).is_some_and(|v| !v.is_empty())
        || inventory.gpus.first().is_some_and(|gpu| gpu.vendor == GpuVendor::Amd)
            && inherited(CUDA_VISIBLE_DEVICES).is_none();
    let variable = if is_rocm { HIP_VISIBLE_DEVICES } else { CUDA_VISIBLE_DEVICES };
    let numbers = || (0..inventory.gpus.len()).map(|n| n.to_string()).collect::<Vec<_>>();
    let trains = job.run.command.is_none();
    if trains && !job.cluster.trains_on_gpus() {
        return Ok(GpuSelection { variable, ..GpuSelection::default() });
    }
    let workers_per_gpu = if trains { job.cluster.workers_per_gpu } else { 0 };
    let is_users = inherited(variable).is_some() && !matches!(job.cluster.devices, DeviceSelection::List(_));
    let (names, set_always) = match &job.cluster.devices {
        DeviceSelection::Cpu => {
            return Ok(GpuSelection { variable, hidden: true, ..GpuSelection::default() });
        }
        DeviceSelection::List(listed) => {
            let absent = listed.iter().find(|n| **n as usize >= inventory.gpus.len());
            if let Some(absent) = absent.filter(|_| !unknown) {
                return Err(unknown_gpu_error(*absent, inventory));
            }
            (listed.iter().map(u32::to_string).collect(), true)
        }
        DeviceSelection::Auto | DeviceSelection::Cuda => match inherited(variable) {
            Some(list) => (parse_device_list(list), false),
            None => (numbers(), false),
        },
    };
    if names.is_empty() && job.cluster.devices == DeviceSelection::Cuda && !unknown {
        let found = describe_gpus(inventory);
        let message = format!("`cluster.devices: cuda` requires a GPU on {}, but {found}", inventory.host);
        return Err(key_error(codes::GPU_REQUIRED, "cluster.devices", message)
            .with_field("host", inventory.host.as_str())
            .with_help("check the driver with `nvidia-smi`"));
    }
    let numa_nodes = names.iter().map(|name| find_numa_node(inventory, name)).collect();
    let in_bus_order = !is_users;
    let hidden = false;
    Ok(GpuSelection {
        names,
        numa_nodes,
        variable,
        set_always,
        in_bus_order,
        hidden,
        unknown,
        workers_per_gpu,
    })
}

/// Creates the error that the host has no GPU with the number `number`.
fn unknown_gpu_error(number: u32, inventory: &HostInventory) -> Diagnostic {
    let message = format!("there is no GPU {number} on {}: {}", inventory.host, describe_gpus(inventory));
    key_error(codes::GPU_INDEX_UNKNOWN, "cluster.devices", message)
        .with_field("host", inventory.host.as_str())
        .with_field("gpu", number)
        .with_field("gpus", inventory.gpus.len())
        .with_help("GPUs count from 0, in the order of the PCI bus")
}

impl GpuSelection {
    /// Keeps only the GPUs whose numbers are among the slots that a filter of hosts selects. If no
    /// filter selects slots, keeps all GPUs. Fails if a slot is not the number of a GPU, or if
    /// `cluster.devices` also lists GPUs. If the job uses no GPUs on the host, fails unless the
    /// selected slots are 0, 1, 2 and so on without gaps.
    pub(super) fn with_selected_slots(self, job: &JobSpec, host: &JobHost) -> diagnostic::Result<Self> {
        let Some(slots) = &host.selected_slots else { return Ok(self) };
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
        if self.unknown && self.names.is_empty() && !self.hidden && uses_gpus {
            let names = slots.iter().map(u32::to_string).collect();
            let numa_nodes = vec![None; slots.len()];
            return Ok(GpuSelection { numa_nodes, names, set_always: true, ..self });
        }
        match self.gpu_count() {
            // Slots of a host without GPUs are interchangeable, so only their number counts.
            0 if are_first => Ok(self),
            0 => {
                let last = slots.len().saturating_sub(1);
                let reason = "which are GPUs by number, but the job uses no GPUs there".to_owned();
                let help = format!("write `{}:0-{last}` for as many workers on CPUs", host.name);
                reject(codes::SLOTS_NOT_GPUS, reason, &help)
            }
            count => match slots.iter().find(|slot| **slot as usize >= count) {
                Some(absent) => {
                    let reason = format!("but the host has no GPU {absent} for the job (GPUs: {count})");
                    reject(codes::GPU_INDEX_UNKNOWN, reason, "slots count from 0")
                }
                None => {
                    let index = |slot: &u32| *slot as usize;
                    let names = slots.iter().map(|slot| self.names[index(slot)].clone()).collect();
                    let numa_nodes = slots.iter().map(|slot| self.numa_nodes[index(slot)]).collect();
                    Ok(GpuSelection { names, numa_nodes, set_always: true, ..self })
                }
            },
        }
    }

    /// Returns the number of GPUs that the job uses on the host.
    pub(super) fn gpu_count(&self) -> usize {
        self.names.len()
    }

    /// Returns the largest number of workers on the host that can have a GPU, alone or shared.
    pub(super) fn worker_capacity(&self) -> usize {
        self.gpu_count() * self.workers_per_gpu.max(1) as usize
    }

    /// Returns the index in `names` of the GPU that the worker with the local rank `local_rank`
    /// uses.
    fn gpu_index(&self, local_rank: u32) -> usize {
        (local_rank / self.workers_per_gpu.max(1)) as usize
    }

    /// Returns the NUMA node of the GPU of the worker with this local rank; `None` if unknown or
    /// without a GPU.
    pub(super) fn numa_node_of(&self, local_rank: u32) -> Option<u32> {
        self.numa_nodes.get(self.gpu_index(local_rank)).copied().flatten()
    }

    /// Returns the name of the device of the worker with this local rank: `gpu 0`, `cpu` or
    /// `unknown`.
    pub(super) fn device_label(&self, local_rank: u32) -> String {
        let none = if self.unknown { "unknown" } else { "cpu" };
        self.names
            .get(self.gpu_index(local_rank))
            .map_or_else(|| none.to_owned(), |name| format!("gpu {name}"))
    }

    /// Fails if the job requires GPUs, and there are too few for each of `workers` workers to have
    /// a GPU or a share of one. Skips the check if no GPU is selected because the GPUs of the host
    /// are not known yet.
    pub(super) fn check_workers(
        &self,
        job: &JobSpec,
        workers: u32,
        inventory: &HostInventory,
    ) -> diagnostic::Result<()> {
        let (count, host) = (self.gpu_count(), &inventory.host);
        let too_few = self.worker_capacity() < workers as usize && !(self.unknown && count == 0);
        let reject = |key: &str, message: String, help: &str| {
            Err(key_error(codes::GPUS_TOO_FEW, key, message)
                .with_field("host", host.as_str())
                .with_field("workers", workers)
                .with_field("gpus", count)
                .with_help(help))
        };
        if self.workers_per_gpu > 0 && too_few {
            let message = format!(
                "{workers} workers with {} per GPU need more than the {} of {host}",
                self.workers_per_gpu,
                format_count(count, "GPU")
            );
            let help = "use fewer workers, or raise `cluster.workers_per_gpu`";
            return reject("cluster.workers_per_host", message, help);
        }
        if job.run.visible_devices == VisibleDevices::One && too_few {
            let message = format!("{workers} workers need a GPU each, but {host} has {count}");
            return reject("run.visible_devices", message, "use fewer workers, or `all`");
        }
        Ok(())
    }

    /// Returns the environment variables that select the GPUs of the worker with this local rank.
    /// The list is empty if the worker inherits the GPUs of its agent. Built-in workers always get
    /// one GPU, so `policy` only applies to programs.
    pub(super) fn build_gpu_env(
        &self,
        policy: VisibleDevices,
        local_rank: u32,
    ) -> Vec<(&'static str, String)> {
        let policy = if self.workers_per_gpu > 0 { VisibleDevices::One } else { policy };
        let visible = match (policy, self.names.get(self.gpu_index(local_rank))) {
            _ if self.hidden => String::new(),
            (VisibleDevices::One, Some(name)) => name.clone(),
            _ if self.set_always => self.names.join(","),
            _ => return Vec::new(),
        };
        // Programs for ROCm also read CUDA's variable, which torchrun sets for them.
        let mut env = vec![(CUDA_VISIBLE_DEVICES, visible.clone())];
        if self.in_bus_order && self.variable == CUDA_VISIBLE_DEVICES && !visible.is_empty() {
            // By default CUDA numbers the fastest GPU first.
            env.push((CUDA_DEVICE_ORDER, "PCI_BUS_ID".to_owned()));
        }
        if self.variable == HIP_VISIBLE_DEVICES {
            env.push((HIP_VISIBLE_DEVICES, visible));
        }
        env
    }
}

/// Parses the entries of `CUDA_VISIBLE_DEVICES`. Like CUDA, ignores the first invalid entry and
/// everything after it.
fn parse_device_list(list: &str) -> Vec<String> {
    let entries = list.split(',').map(str::trim);
    entries.take_while(|entry| !entry.is_empty() && !entry.starts_with('-')).map(str::to_owned).collect()
}

/// Returns the NUMA node of the GPU whose number is `name`, or whose UUID begins with `name`.
/// Returns `None` if the node or the GPU is unknown.
fn find_numa_node(inventory: &HostInventory, name: &str) -> Option<u32> {
    let by_number = name.parse::<usize>().ok().and_then(|n| inventory.gpus.get(n));
    let by_uuid = || inventory.gpus.iter().find(|g| g.uuid.as_deref().is_some_and(|u| u.starts_with(name)));
    by_number.or_else(by_uuid)?.numa_node
}

/// Describes the GPUs of a host for an error message, such as "the host has GPUs 0 to 3".
fn describe_gpus(inventory: &HostInventory) -> String {
    match inventory.gpus.len() {
        0 => "no GPU was found".to_owned(),
        1 => "the host has GPU 0".to_owned(),
        n => format!("the host has GPUs 0 to {}", n - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::hardware::GpuDevice;

    /// Returns the inventory of a host with one GPU on each of the NUMA nodes `nodes`. `inherited`
    /// contains the environment variables of the host.
    fn build_inventory(vendor: GpuVendor, nodes: &[u32], inherited: &[(&str, &str)]) -> HostInventory {
        let gpu = |(i, node): (usize, &u32)| GpuDevice {
            vendor,
            bus: None,
            uuid: Some(format!("GPU-{i}f")),
            numa_node: Some(*node),
        };
        let inherited_env = inherited.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        HostInventory {
            host: "h".into(),
            cpus: vec![0],
            gpus: nodes.iter().enumerate().map(gpu).collect(),
            inherited_env,
            ..HostInventory::default()
        }
    }

    fn job_with_devices(devices: DeviceSelection) -> JobSpec {
        let mut job = crate::testing::sample_job();
        job.cluster.devices = devices;
        job
    }

    /// Formats the environment variables that select the GPUs of the worker with the local rank
    /// `rank`. Panics if the selection is rejected.
    fn format_env(
        inventory: &HostInventory,
        devices: DeviceSelection,
        policy: VisibleDevices,
        rank: u32,
    ) -> String {
        let gpus = select_gpus(&job_with_devices(devices), inventory).expect("GPUs");
        gpus.build_gpu_env(policy, rank).iter().map(|(n, v)| format!("{n}={v}")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn gpu_variables_follow_the_policy_and_the_inventory() {
        use VisibleDevices::{All, One};
        let cuda = |inherited: &[(&str, &str)]| build_inventory(GpuVendor::Nvidia, &[0, 0, 1, 1], inherited);
        let (plain, some) = (cuda(&[]), cuda(&[("CUDA_VISIBLE_DEVICES", "3, GPU-1f")]));
        for (inventory, devices, policy, rank, expected) in [
            (&plain, DeviceSelection::Auto, All, 2, ""),
            (&plain, DeviceSelection::Auto, One, 2, "CUDA_VISIBLE_DEVICES=2 CUDA_DEVICE_ORDER=PCI_BUS_ID"),
            (
                &plain,
                DeviceSelection::List(vec![2, 0]),
                All,
                1,
                "CUDA_VISIBLE_DEVICES=2,0 CUDA_DEVICE_ORDER=PCI_BUS_ID",
            ),
            (
                &plain,
                DeviceSelection::List(vec![2, 0]),
                One,
                1,
                "CUDA_VISIBLE_DEVICES=0 CUDA_DEVICE_ORDER=PCI_BUS_ID",
            ),
            (&plain, DeviceSelection::Cpu, All, 0, "CUDA_VISIBLE_DEVICES="),
            (&some, DeviceSelection::Auto, All, 1, ""),
            (&some, DeviceSelection::Cuda, One, 1, "CUDA_VISIBLE_DEVICES=GPU-1f"),
            (
                &some,
                DeviceSelection::List(vec![0]),
                All,
                0,
                "CUDA_VISIBLE_DEVICES=0 CUDA_DEVICE_ORDER=PCI_BUS_ID",
            ),
            (
                &cuda(&[("HIP_VISIBLE_DEVICES", "1,2"), ("CUDA_VISIBLE_DEVICES", "0")]),
                DeviceSelection::Auto,
                One,
                1,
                "CUDA_VISIBLE_DEVICES=2 HIP_VISIBLE_DEVICES=2",
            ),
            (
                &build_inventory(GpuVendor::Amd, &[0], &[]),
                DeviceSelection::Auto,
                One,
                0,
                "CUDA_VISIBLE_DEVICES=0 HIP_VISIBLE_DEVICES=0",
            ),
            (&build_inventory(GpuVendor::Nvidia, &[], &[]), DeviceSelection::Auto, All, 0, ""),
        ] {
            assert_eq!(format_env(inventory, devices, policy, rank), expected);
        }
        let gpus = select_gpus(&job_with_devices(DeviceSelection::Auto), &some).expect("GPUs");
        assert_eq!(
            (gpus.gpu_count(), gpus.numa_node_of(0), gpus.numa_node_of(1), gpus.numa_node_of(2)),
            (2, Some(1), Some(0), None)
        );
    }

    /// Checks that the slots of a host filter are GPU numbers, as in DeepSpeed.
    #[test]
    fn selected_slots_are_gpus() {
        let four = build_inventory(GpuVendor::Nvidia, &[0, 0, 1, 1], &[]);
        let chosen = build_inventory(GpuVendor::Nvidia, &[0, 0, 1, 1], &[("CUDA_VISIBLE_DEVICES", "3,1")]);
        let none = build_inventory(GpuVendor::Nvidia, &[], &[]);
        let unknown = HostInventory::unknown("h");
        let select = |inventory: &HostInventory, devices: DeviceSelection, slots: &[u32]| {
            let mut job = job_with_devices(devices);
            job.cluster.include = vec!["h:0".into()];
            let (slots, selected_slots) = (Some(slots.len() as u32), Some(slots.to_vec()));
            let (name, inventory) = ("h".into(), inventory.clone());
            let host = JobHost { name, slots, selected_slots, local: false, inventory: inventory.clone() };
            let gpus = select_gpus(&job, &inventory)?.with_selected_slots(&job, &host)?;
            let env = gpus.build_gpu_env(VisibleDevices::All, 0);
            let last = gpus.numa_node_of(slots.unwrap_or(1) - 1);
            Ok::<_, Diagnostic>((env.first().map_or_else(String::new, |(_, value)| value.clone()), last))
        };
        let expected = |text: &str, node| Ok((text.to_owned(), node));
        assert_eq!(select(&four, DeviceSelection::Auto, &[2, 3]), expected("2,3", Some(1)));
        assert_eq!(select(&four, DeviceSelection::Cuda, &[0, 1]), expected("0,1", Some(0)));
        assert_eq!(select(&chosen, DeviceSelection::Auto, &[1]), expected("1", Some(0)));
        assert_eq!(select(&chosen, DeviceSelection::Auto, &[0]), expected("3", Some(1)));
        assert_eq!(select(&unknown, DeviceSelection::Auto, &[1, 3]), expected("1,3", None));
        assert_eq!(select(&none, DeviceSelection::Auto, &[0, 1]), expected("", None));
        assert_eq!(select(&four, DeviceSelection::Cpu, &[0, 1]), expected("", None));
        for (inventory, devices, slots, code) in [
            (&four, DeviceSelection::Auto, &[3, 4][..], codes::GPU_INDEX_UNKNOWN),
            (&chosen, DeviceSelection::Auto, &[2], codes::GPU_INDEX_UNKNOWN),
            (&none, DeviceSelection::Auto, &[2, 3], codes::SLOTS_NOT_GPUS),
            (&four, DeviceSelection::Cpu, &[1], codes::SLOTS_NOT_GPUS),
            (&four, DeviceSelection::List(vec![0, 1]), &[1], codes::SLOTS_NOT_GPUS),
        ] {
            let error = select(inventory, devices, slots).expect_err("rejected");
            assert_eq!((error.code(), error.subject()), (code, Some("cluster.include")), "{error}");
        }
    }

    /// Checks that a built-in worker sees only its own GPU, and that `workers_per_gpu` workers
    /// share one.
    #[test]
    fn built_in_workers_have_a_gpu_each_unless_they_share() {
        let inventory = build_inventory(GpuVendor::Nvidia, &[0, 1], &[]);
        let mut job = job_with_devices(DeviceSelection::Cuda);
        job.run.command = None;
        let seen = |job: &JobSpec, rank| {
            let gpus = select_gpus(job, &inventory).expect("GPUs");
            let env = gpus.build_gpu_env(VisibleDevices::All, rank);
            (env[0].1.clone(), gpus.numa_node_of(rank), gpus.device_label(rank))
        };
        assert_eq!(seen(&job, 1), ("1".to_owned(), Some(1), "gpu 1".to_owned()));
        let gpus = select_gpus(&job, &inventory).expect("GPUs");
        let too_few = gpus.check_workers(&job, 3, &inventory).expect_err("two GPUs");
        assert_eq!(too_few.code(), codes::GPUS_TOO_FEW);
        assert_eq!(too_few.subject(), Some("cluster.workers_per_host"));
        job.cluster.workers_per_gpu = 2;
        assert_eq!(seen(&job, 1).0, "0");
        assert_eq!(seen(&job, 3), ("1".to_owned(), Some(1), "gpu 1".to_owned()));
        let gpus = select_gpus(&job, &inventory).expect("GPUs");
        assert_eq!(gpus.worker_capacity(), 4);
        assert!(
            gpus.check_workers(&job, 4, &inventory).is_ok()
                && gpus.check_workers(&job, 5, &inventory).is_err()
        );
        job.cluster.devices = DeviceSelection::Auto;
        assert_eq!(select_gpus(&job, &inventory).expect("no GPU").gpu_count(), 0);
    }

    #[test]
    fn an_empty_list_of_devices_hides_all_gpus() {
        let hidden = build_inventory(GpuVendor::Nvidia, &[0], &[("CUDA_VISIBLE_DEVICES", "")]);
        assert_eq!(
            select_gpus(&job_with_devices(DeviceSelection::Auto), &hidden).expect("GPUs").gpu_count(),
            0
        );
        assert!(select_gpus(&job_with_devices(DeviceSelection::Cuda), &hidden).is_err());
        assert_eq!(parse_device_list("0,-1,2"), ["0"]);
    }

    #[test]
    fn gpus_that_do_not_exist_are_rejected() {
        let inventory = build_inventory(GpuVendor::Nvidia, &[0, 0], &[]);
        let error = select_gpus(&job_with_devices(DeviceSelection::List(vec![0, 2])), &inventory)
            .expect_err("no GPU 2");
        assert_eq!((error.code(), error.field("gpu")), (codes::GPU_INDEX_UNKNOWN, Some(&2.into())));
        let mut one = job_with_devices(DeviceSelection::Auto);
        one.run.visible_devices = VisibleDevices::One;
        let gpus = select_gpus(&one, &inventory).expect("GPUs");
        assert!(gpus.check_workers(&one, 2, &inventory).is_ok());
        let error = gpus.check_workers(&one, 3, &inventory).expect_err("two GPUs");
        assert_eq!((error.code(), error.subject()), (codes::GPUS_TOO_FEW, Some("run.visible_devices")));
    }
}
