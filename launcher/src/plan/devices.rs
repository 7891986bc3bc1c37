//! Which GPUs the workers of a host see.
use super::Host;
use crate::discover::Facts;
use contract::{
    env::{CUDA_DEVICE_ORDER, CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, VISIBLE_DEVICES},
    job::{Devices, JobSpec, VisibleDevices},
    preflight::Finding,
    machine::Maker,
};

/// The GPUs of a job on this host, by the number that a program gives them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Gpus {
    /// As `CUDA_VISIBLE_DEVICES` names them; never empty entries.
    names: Vec<String>,
    /// The NUMA node of each, where that is known.
    nodes: Vec<Option<u32>>,
    /// The variable that decides on this host.
    decides: &'static str,
    /// Say to programs which they are, whatever launch's own environment says.
    told: bool,
    /// Their names are numbers in the order of the PCI bus, not of whoever set `CUDA_VISIBLE_DEVICES`.
    numbered: bool,
    /// GPUs are hidden.
    hidden: bool,
    /// The host wasn't asked yet which it has.
    unknown: bool,
    /// Built-in workers that share a GPU, each of which sees its own alone; 0: they are a program's.
    per_gpu: u32,
}

/// The GPUs that the job's programs use on a host like this.
pub(super) fn of_job(job: &JobSpec, facts: &Facts) -> Result<Gpus, Finding> {
    let chosen = |name: &str| facts.chosen.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
    let unknown = facts.is_promised();
    let hip = chosen(HIP_VISIBLE_DEVICES).is_some_and(|v| !v.is_empty())
        || facts.gpus.first().is_some_and(|gpu| gpu.maker == Maker::Amd)
            && chosen(CUDA_VISIBLE_DEVICES).is_none();
    let decides = if hip { HIP_VISIBLE_DEVICES } else { CUDA_VISIBLE_DEVICES };
    let found = || (0..facts.gpus.len()).map(|n| n.to_string()).collect::<Vec<_>>();
    let trains = job.run.command.is_none();
    if trains && !job.cluster.trains_on_gpus() {
        return Ok(Gpus { decides, ..Gpus::default() });
    }
    let per_gpu = if trains { job.cluster.workers_per_gpu } else { 0 };
    let theirs = chosen(decides).is_some() && !matches!(job.cluster.devices, Devices::List(_));
    let (names, told) = match &job.cluster.devices {
        Devices::Cpu => return Ok(Gpus { decides, hidden: true, ..Gpus::default() }),
        Devices::List(numbers) => {
            let absent = numbers.iter().find(|n| **n as usize >= facts.gpus.len());
            if let Some(absent) = absent.filter(|_| !unknown) {
                let message = format!("there is no GPU {absent} on {}: {}", facts.host, had(facts));
                return Err(problem(
                    "cluster.devices",
                    message,
                    "GPUs count from 0, in the order of the PCI bus",
                ));
            }
            (numbers.iter().map(u32::to_string).collect(), true)
        }
        Devices::Auto | Devices::Cuda => match chosen(decides) {
            Some(list) => (entries(list), false),
            None => (found(), false),
        },
    };
    if names.is_empty() && job.cluster.devices == Devices::Cuda && !unknown {
        let message = format!("`cluster.devices: cuda` needs a GPU on {}: {}", facts.host, had(facts));
        return Err(problem(
            "cluster.devices",
            message,
            "is the driver loaded? `nvidia-smi` shows what it sees",
        ));
    }
    let nodes = names.iter().map(|name| node(facts, name)).collect();
    Ok(Gpus { names, nodes, decides, told, numbered: !theirs, hidden: false, unknown, per_gpu })
}

impl Gpus {
    /// Of them, those whose numbers DeepSpeed's filters picked.
    pub(super) fn picked(self, job: &JobSpec, host: &Host) -> Result<Self, Finding> {
        let Some(slots) = &host.picked else { return Ok(self) };
        let are_first = slots.iter().zip(0..).all(|(slot, index)| *slot == index);
        let path = if job.cluster.include.is_empty() { "cluster.exclude" } else { "cluster.include" };
        let refuse = |why: String, hint: &str| {
            let message = format!("`{path}` picks slots {slots:?} of {}, {why}", host.name);
            Err(problem(path, message, hint))
        };
        if matches!(job.cluster.devices, Devices::List(_)) {
            let why = "and `cluster.devices` names GPUs by number too".to_owned();
            return refuse(why, "use one of the two");
        }
        let uses_gpus = job.run.command.is_some() || self.per_gpu > 0;
        if self.unknown && self.names.is_empty() && !self.hidden && uses_gpus {
            let names = slots.iter().map(u32::to_string).collect();
            return Ok(Gpus { nodes: vec![None; slots.len()], names, told: true, ..self });
        }
        match self.count() {
            // A slot of a CPU is as good as any other: how many there are counts.
            0 if are_first => Ok(self),
            0 => {
                let count = slots.len().saturating_sub(1);
                let why = "which are GPUs by number, and the job uses none there".to_owned();
                refuse(why, &format!("write `{}:0-{count}` for as many workers on CPUs", host.name))
            }
            has => match slots.iter().find(|slot| **slot as usize >= has) {
                Some(absent) => refuse(
                    format!("which has no GPU {absent} for the job: it has {has}"),
                    "slots count from 0",
                ),
                None => {
                    let at = |slot: &u32| *slot as usize;
                    let names = slots.iter().map(|slot| self.names[at(slot)].clone()).collect();
                    let nodes = slots.iter().map(|slot| self.nodes[at(slot)]).collect();
                    Ok(Gpus { names, nodes, told: true, ..self })
                }
            },
        }
    }

    pub(super) fn count(&self) -> usize {
        self.names.len()
    }

    /// Workers that have a GPU.
    pub(super) fn workers(&self) -> usize {
        self.count() * self.per_gpu.max(1) as usize
    }

    /// Which GPU is a worker's.
    fn of(&self, local_rank: u32) -> usize {
        (local_rank / self.per_gpu.max(1)) as usize
    }

    /// The NUMA node of a worker's GPU.
    pub(super) fn node(&self, local_rank: u32) -> Option<u32> {
        self.nodes.get(self.of(local_rank)).copied().flatten()
    }

    /// What a person calls a worker's device.
    pub(super) fn label(&self, local_rank: u32) -> String {
        let none = if self.unknown { "unknown" } else { "cpu" };
        self.names.get(self.of(local_rank)).map_or_else(|| none.to_owned(), |name| format!("gpu {name}"))
    }

    /// Can each of these workers have what the job says?
    pub(super) fn check(&self, job: &JobSpec, workers: u32, facts: &Facts) -> Result<(), Finding> {
        let (count, host) = (self.count(), &facts.host);
        let few = self.workers() < workers as usize && !(self.unknown && count == 0);
        if self.per_gpu > 0 && few {
            let message = format!(
                "{workers} workers, {} on each GPU, need more than the {count} that {host} has for them",
                self.per_gpu
            );
            let hint = "use fewer workers, or let several share a GPU by `cluster.workers_per_gpu`";
            return Err(problem("cluster.workers_per_host", message, hint));
        }
        if job.run.visible_devices == VisibleDevices::One && few {
            let message = format!("{workers} workers need a GPU each, {host} has {count} for them");
            return Err(problem("run.visible_devices", message, "use fewer workers, or `all`"));
        }
        Ok(())
    }

    /// What a worker is told of them.
    pub(super) fn env(&self, policy: VisibleDevices, local_rank: u32) -> Vec<(&'static str, String)> {
        let policy = if self.per_gpu > 0 { VisibleDevices::One } else { policy };
        let seen = match (policy, self.names.get(self.of(local_rank))) {
            _ if self.hidden => String::new(),
            (VisibleDevices::One, Some(own)) => own.clone(),
            _ if self.told => self.names.join(","),
            _ => return Vec::new(),
        };
        // Programs for ROCm read CUDA's variable too, as torchrun sets it.
        let mut env = vec![(CUDA_VISIBLE_DEVICES, seen.clone())];
        if self.numbered && self.decides == CUDA_VISIBLE_DEVICES && !seen.is_empty() {
            // CUDA counts the fastest first otherwise.
            env.push((CUDA_DEVICE_ORDER, "PCI_BUS_ID".to_owned()));
        }
        if self.decides == HIP_VISIBLE_DEVICES {
            env.push((HIP_VISIBLE_DEVICES, seen));
        }
        env
    }
}

/// Names that [`Gpus::env`] or the user's own environment decides, never a pattern of `run.pass_env`.
pub(crate) fn is_device_variable(name: &str) -> bool {
    VISIBLE_DEVICES.contains(&name)
}

fn entries(list: &str) -> Vec<String> {
    // CUDA stops at the first entry that is none.
    let all = list.split(',').map(str::trim);
    all.take_while(|entry| !entry.is_empty() && !entry.starts_with('-')).map(str::to_owned).collect()
}

fn node(facts: &Facts, name: &str) -> Option<u32> {
    let by_number = name.parse::<usize>().ok().and_then(|n| facts.gpus.get(n));
    let by_uuid = || facts.gpus.iter().find(|g| g.uuid.as_deref().is_some_and(|u| u.starts_with(name)));
    by_number.or_else(by_uuid)?.node
}

fn had(facts: &Facts) -> String {
    match facts.gpus.len() {
        0 => "none was found".to_owned(),
        1 => "it has GPU 0".to_owned(),
        n => format!("it has GPUs 0 to {}", n - 1),
    }
}

fn problem(path: &str, message: String, hint: &str) -> Finding {
    Finding { path: path.to_owned(), message, hint: Some(hint.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::machine::Gpu;

    fn machine(maker: Maker, nodes: &[u32], chosen: &[(&str, &str)]) -> Facts {
        let gpu = |(i, node): (usize, &u32)| Gpu {
            maker,
            bus: None,
            uuid: Some(format!("GPU-{i}f")),
            node: Some(*node),
        };
        let chosen = chosen.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        Facts {
            host: "h".into(),
            cpus: vec![0],
            gpus: nodes.iter().enumerate().map(gpu).collect(),
            chosen,
            ..Facts::default()
        }
    }

    fn job(devices: Devices) -> JobSpec {
        let mut job = crate::testing::job();
        job.cluster.devices = devices;
        job
    }

    fn said(facts: &Facts, devices: Devices, policy: VisibleDevices, rank: u32) -> String {
        let gpus = of_job(&job(devices), facts).expect("GPUs");
        gpus.env(policy, rank).iter().map(|(n, v)| format!("{n}={v}")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_policy_on_each_kind_of_machine() {
        use VisibleDevices::{All, One};
        let cuda = |chosen: &[(&str, &str)]| machine(Maker::Nvidia, &[0, 0, 1, 1], chosen);
        let (plain, some) = (cuda(&[]), cuda(&[("CUDA_VISIBLE_DEVICES", "3, GPU-1f")]));
        for (facts, devices, policy, rank, want) in [
            (&plain, Devices::Auto, All, 2, ""),
            (&plain, Devices::Auto, One, 2, "CUDA_VISIBLE_DEVICES=2 CUDA_DEVICE_ORDER=PCI_BUS_ID"),
            (
                &plain,
                Devices::List(vec![2, 0]),
                All,
                1,
                "CUDA_VISIBLE_DEVICES=2,0 CUDA_DEVICE_ORDER=PCI_BUS_ID",
            ),
            (
                &plain,
                Devices::List(vec![2, 0]),
                One,
                1,
                "CUDA_VISIBLE_DEVICES=0 CUDA_DEVICE_ORDER=PCI_BUS_ID",
            ),
            (&plain, Devices::Cpu, All, 0, "CUDA_VISIBLE_DEVICES="),
            (&some, Devices::Auto, All, 1, ""),
            (&some, Devices::Cuda, One, 1, "CUDA_VISIBLE_DEVICES=GPU-1f"),
            (&some, Devices::List(vec![0]), All, 0, "CUDA_VISIBLE_DEVICES=0 CUDA_DEVICE_ORDER=PCI_BUS_ID"),
            (
                &cuda(&[("HIP_VISIBLE_DEVICES", "1,2"), ("CUDA_VISIBLE_DEVICES", "0")]),
                Devices::Auto,
                One,
                1,
                "CUDA_VISIBLE_DEVICES=2 HIP_VISIBLE_DEVICES=2",
            ),
            (
                &machine(Maker::Amd, &[0], &[]),
                Devices::Auto,
                One,
                0,
                "CUDA_VISIBLE_DEVICES=0 HIP_VISIBLE_DEVICES=0",
            ),
            (&machine(Maker::Nvidia, &[], &[]), Devices::Auto, All, 0, ""),
        ] {
            assert_eq!(said(facts, devices, policy, rank), want);
        }
        let gpus = of_job(&job(Devices::Auto), &some).expect("GPUs");
        assert_eq!((gpus.count(), gpus.node(0), gpus.node(1), gpus.node(2)), (2, Some(1), Some(0), None));
    }

    /// A filter's slots are GPUs of the host by number, as with DeepSpeed.
    #[test]
    fn picked_slots_are_gpus() {
        let four = machine(Maker::Nvidia, &[0, 0, 1, 1], &[]);
        let chosen = machine(Maker::Nvidia, &[0, 0, 1, 1], &[("CUDA_VISIBLE_DEVICES", "3,1")]);
        let none = machine(Maker::Nvidia, &[], &[]);
        let promised = Facts::promised("h");
        let of = |facts: &Facts, devices: Devices, slots: &[u32]| {
            let mut job = job(devices);
            job.cluster.include = vec!["h:0".into()];
            let (slots, picked) = (Some(slots.len() as u32), Some(slots.to_vec()));
            let host = Host { name: "h".into(), slots, picked, local: false, facts: facts.clone() };
            let gpus = of_job(&job, facts)?.picked(&job, &host)?;
            let env = gpus.env(VisibleDevices::All, 0);
            let last = gpus.node(slots.unwrap_or(1) - 1);
            Ok::<_, Finding>((env.first().map_or_else(String::new, |(_, value)| value.clone()), last))
        };
        let said = |text: &str, node| Ok((text.to_owned(), node));
        assert_eq!(of(&four, Devices::Auto, &[2, 3]), said("2,3", Some(1)));
        assert_eq!(of(&four, Devices::Cuda, &[0, 1]), said("0,1", Some(0)));
        assert_eq!(of(&chosen, Devices::Auto, &[1]), said("1", Some(0)));
        assert_eq!(of(&chosen, Devices::Auto, &[0]), said("3", Some(1)));
        assert_eq!(of(&promised, Devices::Auto, &[1, 3]), said("1,3", None));
        assert_eq!(of(&none, Devices::Auto, &[0, 1]), said("", None));
        assert_eq!(of(&four, Devices::Cpu, &[0, 1]), said("", None));
        for (facts, devices, slots, part) in [
            (&four, Devices::Auto, &[3, 4][..], "no GPU 4 for the job: it has 4"),
            (&chosen, Devices::Auto, &[2], "no GPU 2"),
            (&none, Devices::Auto, &[2, 3], "uses none there"),
            (&four, Devices::Cpu, &[1], "uses none there"),
            (&four, Devices::List(vec![0, 1]), &[1], "by number too"),
        ] {
            let finding = of(facts, devices, slots).expect_err(part);
            assert!(finding.message.contains(part) && finding.path == "cluster.include", "{finding:?}");
        }
    }

    /// Built-in workers see their own GPU alone; several share one where the job says so.
    #[test]
    fn built_in_workers_have_a_gpu_each_unless_they_share() {
        let facts = machine(Maker::Nvidia, &[0, 1], &[]);
        let mut job = job(Devices::Cuda);
        job.run.command = None;
        let seen = |job: &JobSpec, rank| {
            let gpus = of_job(job, &facts).expect("GPUs");
            let env = gpus.env(VisibleDevices::All, rank);
            (env[0].1.clone(), gpus.node(rank), gpus.label(rank))
        };
        assert_eq!(seen(&job, 1), ("1".to_owned(), Some(1), "gpu 1".to_owned()));
        let gpus = of_job(&job, &facts).expect("GPUs");
        let few = gpus.check(&job, 3, &facts).expect_err("refused");
        assert!(few.message.starts_with("3 workers, 1 on each GPU"), "{few:?}");
        job.cluster.workers_per_gpu = 2;
        assert_eq!(seen(&job, 1).0, "0");
        assert_eq!(seen(&job, 3), ("1".to_owned(), Some(1), "gpu 1".to_owned()));
        let gpus = of_job(&job, &facts).expect("GPUs");
        assert_eq!(gpus.workers(), 4);
        assert!(gpus.check(&job, 4, &facts).is_ok() && gpus.check(&job, 5, &facts).is_err());
        job.cluster.devices = Devices::Auto;
        assert_eq!(of_job(&job, &facts).expect("no GPU").count(), 0);
    }

    #[test]
    fn an_empty_choice_means_none() {
        let hidden = machine(Maker::Nvidia, &[0], &[("CUDA_VISIBLE_DEVICES", "")]);
        assert_eq!(of_job(&job(Devices::Auto), &hidden).expect("GPUs").count(), 0);
        assert!(of_job(&job(Devices::Cuda), &hidden).is_err());
        assert_eq!(entries("0,-1,2"), ["0"]);
    }

    #[test]
    fn what_was_asked_for_is_had_or_refused() {
        let facts = machine(Maker::Nvidia, &[0, 0], &[]);
        let why = of_job(&job(Devices::List(vec![0, 2])), &facts).expect_err("refused").message;
        assert_eq!(why, "there is no GPU 2 on h: it has GPUs 0 to 1");
        let mut one = job(Devices::Auto);
        one.run.visible_devices = VisibleDevices::One;
        let gpus = of_job(&one, &facts).expect("GPUs");
        assert!(gpus.check(&one, 2, &facts).is_ok());
        assert_eq!(
            gpus.check(&one, 3, &facts).expect_err("refused").message,
            "3 workers need a GPU each, h has 2 for them"
        );
    }
}
