//! What was found of a host's GPUs, judged.
use super::{
    Check, Level,
    judge::{bad, ok},
};
use crate::cmd::plan::bytes;
use contract::probe::{GpuLook, LibraryLook, NodeLook};

/// How many there are, and whether they are fit to compute with. `slots`: as the hostfile promises.
pub(super) fn judge(look: &NodeLook, first: &NodeLook, slots: Option<u32>) -> Vec<Check> {
    let (gpus, theirs) = (&look.gpus, &first.gpus);
    let mut checks = Vec::new();
    let count = gpus.gpus.len() as u32;
    let name = gpus.gpus.first().map_or("", |g| g.name.as_str());
    checks.push(match &gpus.trouble {
        Some(why) => bad(
            Level::Warn,
            "gpus",
            format!("{} devices, but {why}", gpus.devices),
            "does `nvidia-smi` work on the host?",
        ),
        None if slots.is_some_and(|slots| count > 0 && slots > count) => {
            let found = format!("{count}, and the hostfile says {} slots", slots.unwrap_or(0));
            bad(Level::Warn, "gpus", found, "ranks share GPUs, unless the job computes on the CPU")
        }
        None if count != theirs.gpus.len() as u32 => bad(
            Level::Warn,
            "gpus",
            format!("{count}, {} has {}", first.hostname, theirs.gpus.len()),
            "uneven hosts: is a GPU missing?",
        ),
        None if count == 0 => ok("gpus", "none"),
        None => ok("gpus", format!("{count} × {name}")),
    });
    if let Some(driver) = &gpus.driver {
        checks.push(match theirs.driver.as_ref().filter(|other| *other != driver) {
            Some(other) => bad(
                Level::Warn,
                "driver",
                format!("{driver}, {} has {other}", first.hostname),
                "install the same driver on all hosts",
            ),
            None => ok("driver", driver.clone()),
        });
    }
    match gpus.libraries.is_empty() {
        true => checks.push(nccl(gpus, first)),
        false => checks.extend(libraries(gpus, first)),
    }
    checks.extend(memory(gpus));
    checks.extend(health(gpus));
    checks.extend(links(gpus));
    checks
}

/// NCCL as a program may find it.
fn nccl(gpus: &GpuLook, first: &NodeLook) -> Check {
    match (&gpus.nccl, &first.gpus.nccl) {
        (Some((_, own)), Some((_, other))) if own != other => bad(
            Level::Warn,
            "nccl",
            format!("{own}, {} has {other}", first.hostname),
            "install the same NCCL on all hosts",
        ),
        (Some((path, version)), _) => ok("nccl", format!("{version} ({path})")),
        (None, _) => ok("nccl", "not found by the loader (programs may bring their own)"),
    }
}

/// What the built-in runtime opens to train on GPUs: there, and the same as on the first host.
fn libraries(gpus: &GpuLook, first: &NodeLook) -> Vec<Check> {
    const WHAT: &str = "cuda";
    let theirs = |name: &str| {
        let library = first.gpus.libraries.iter().find(|library| library.name == name)?;
        library.found.as_ref().ok().map(|(version, _)| version)
    };
    let judged = gpus.libraries.iter().map(|LibraryLook { name, needed, found }| match found {
        Ok((version, _)) if theirs(name).is_some_and(|other| other != version) => {
            let other = theirs(name).map_or("", String::as_str);
            let found = format!("{name} {version}, {} has {other}", first.hostname);
            bad(Level::Warn, WHAT, found, "install the same version on all hosts")
        }
        Ok((version, path)) => ok(WHAT, format!("{name} {version} ({})", path.display())),
        Err(_) if name == "cuDNN" => ok(WHAT, "no cuDNN: attention is launch's own".to_owned()),
        Err(why) => {
            let (level, hint) = match needed {
                true => (Level::Fail, "a job with `cluster.devices: cuda` needs it; `cluster.cuda_libs` may name its folder"),
                false => (Level::Warn, "only workers with a GPU of their own each need it; the host's memory serves instead (`cluster.collectives`)"),
            };
            bad(level, WHAT, format!("{name}: {why}"), hint)
        }
    });
    judged.collect()
}

/// Broken memory, clocks that are held down, modes in which ranks can't use it as they do.
fn health(gpus: &GpuLook) -> Vec<Check> {
    const WHAT: &str = "gpu health";
    let mut checks = Vec::new();
    for (index, gpu) in gpus.gpus.iter().enumerate() {
        let mut warn = |found: String, hint: &str| {
            checks.push(bad(Level::Warn, WHAT, format!("GPU {index} ({}): {found}", gpu.bus), hint));
        };
        if let Some(errors @ 1..) = gpu.ecc_errors {
            let found = format!("{errors} errors of memory that ECC couldn't correct");
            warn(found, "reset it (`nvidia-smi --gpu-reset`); if they come again, replace it");
        }
        if gpu.rows.0 {
            warn("rows of memory are to be replaced".into(), "reset it: `nvidia-smi --gpu-reset`");
        }
        if gpu.rows.1 {
            warn(
                "rows of memory couldn't be replaced".into(),
                "leave the host out (`cluster.exclude`); replace the GPU",
            );
        }
        if !gpu.slowed.is_empty() {
            warn(
                format!("its clocks are held down: {}", gpu.slowed.join(", ")),
                "look at its cooling and power supply",
            );
        }
        if gpu.exclusive {
            warn(
                "its compute mode isn't the default".into(),
                "`nvidia-smi --compute-mode=DEFAULT` lets several ranks use it",
            );
        }
        if gpu.instances {
            warn(
                "it is cut into instances (MIG)".into(),
                "a rank uses one instance, and NCCL none between them",
            );
        }
    }
    if checks.is_empty() && !gpus.gpus.is_empty() {
        let counts = gpus.gpus.iter().all(|gpu| gpu.ecc_errors.is_some());
        checks
            .push(ok(WHAT, if counts { "no errors of memory, full clocks" } else { "full clocks (no ECC)" }));
    }
    checks
}

/// How GPUs of one host reach one another.
fn links(gpus: &GpuLook) -> Option<Check> {
    let (first, _) = (gpus.gpus.first()?, gpus.gpus.get(1)?);
    // Once for each pair.
    let pairs = gpus.gpus.iter().enumerate().flat_map(|(index, gpu)| {
        let above = gpu.unreachable.iter().filter(move |(other, _)| *other as usize > index);
        above.map(move |(other, why)| format!("{index} and {other} ({why})"))
    });
    let pairs: Vec<String> = pairs.collect();
    let links: Vec<u32> = gpus.gpus.iter().map(|gpu| gpu.nvlinks).collect();
    Some(if !pairs.is_empty() {
        let found = format!("no direct way between GPUs {}", pairs.join(", "));
        bad(
            Level::Warn,
            "gpu links",
            found,
            "NCCL goes through the host's memory there: is an IOMMU or PCIe ACS on?",
        )
    } else if links.iter().any(|n| *n != first.nvlinks) {
        let found = format!("NVLinks that are up, by GPU: {links:?}");
        bad(
            Level::Warn,
            "gpu links",
            found,
            "links are down: `nvidia-smi nvlink --status`, `dmesg | grep Xid`",
        )
    } else if first.nvlinks > 0 {
        ok("gpu links", format!("{} NVLinks each", first.nvlinks))
    } else {
        ok("gpu links", "over PCIe, directly")
    })
}

/// What is free, and who else computes there.
fn memory(gpus: &GpuLook) -> Vec<Check> {
    let least = gpus.gpus.iter().min_by_key(|g| g.memory_free);
    let free = least.filter(|_| gpus.gpus.iter().all(|g| g.processes.is_empty()));
    if let Some(gpu) = free {
        let found = format!("{} free of {} at least", bytes(gpu.memory_free), bytes(gpu.memory));
        return vec![ok("gpu memory", found)];
    }
    let used = gpus.gpus.iter().enumerate().filter(|(_, g)| !g.processes.is_empty()).map(|(i, g)| {
        let pids: Vec<String> =
            g.processes.iter().map(|(pid, used)| format!("{pid} ({})", bytes(*used))).collect();
        let found = format!(
            "GPU {i}: {} free of {}, used by {}",
            bytes(g.memory_free),
            bytes(g.memory),
            pids.join(", ")
        );
        bad(
            Level::Warn,
            "gpu memory",
            found,
            "someone else computes there: wait, or leave the GPU out with `cluster.exclude`",
        )
    });
    used.collect()
}
