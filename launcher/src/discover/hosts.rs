//! The hosts of a job: what `cluster.hosts` names, less what the filters leave out.
use contract::{
    hosts::{Host, MAX_HOSTFILE, MAX_HOSTS, Slots, filter, parse_hostfile, parse_hosts},
    job::{ClusterSpec, Hosts},
    preflight::Finding,
};
use std::{fs::File, io::Read, path::Path};

/// A host of the job and the slots that it gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClusterHost {
    pub(crate) host: Host,
    pub(crate) slots: Slots,
}

/// Most mistakes of a hostfile that are told.
const MOST_TOLD: usize = 5;

/// The hosts in their order; `None`: none are named (this machine alone, or Slurm's). Relative paths are relative to `base`.
pub(crate) fn hosts(cluster: &ClusterSpec, base: &Path) -> Result<Option<Vec<ClusterHost>>, Vec<Finding>> {
    let listed = match &cluster.hosts {
        Hosts::Auto | Hosts::Local | Hosts::Slurm
            if cluster.include.is_empty() && cluster.exclude.is_empty() =>
        {
            return Ok(None);
        }
        Hosts::Auto | Hosts::Local | Hosts::Slurm => {
            let path = if cluster.include.is_empty() { "cluster.exclude" } else { "cluster.include" };
            let message = format!("`{path}` filters hosts that `cluster.hosts` names, and it names none");
            return Err(vec![finding(path, message, "remove it, or name the hosts")]);
        }
        Hosts::List(texts) => list(texts)?,
        Hosts::File(file) => {
            let file = base.join(file);
            parse(&file, &read(&file)?)?
        }
    };
    filtered(cluster, &listed).map(Some)
}

/// The hosts of this text of a hostfile, less what the job's filters leave out.
pub(crate) fn of_hostfile(
    cluster: &ClusterSpec,
    file: &Path,
    text: &str,
) -> Result<Vec<ClusterHost>, Vec<Finding>> {
    filtered(cluster, &parse(file, text)?)
}

fn filtered(cluster: &ClusterSpec, listed: &[ClusterHost]) -> Result<Vec<ClusterHost>, Vec<Finding>> {
    let names: Vec<(String, Slots)> = listed.iter().map(|h| (h.host.name(), h.slots.clone())).collect();
    let left = filter(&names, &cluster.include, &cluster.exclude).map_err(|fault| {
        let path = if fault.exclude { "cluster.exclude" } else { "cluster.include" };
        let place = fault.item.map_or_else(|| path.to_owned(), |item| format!("{path}[{item}]"));
        vec![finding(&place, format!("`{path}` {}", fault.message), "hosts are named as in `cluster.hosts`")]
    })?;
    let keep = |(index, slots): (usize, Slots)| {
        listed.get(index).map(|h| ClusterHost { host: h.host.clone(), slots })
    };
    Ok(left.into_iter().filter_map(keep).collect())
}

fn list(texts: &[String]) -> Result<Vec<ClusterHost>, Vec<Finding>> {
    let mut hosts = Vec::new();
    for (item, text) in texts.iter().enumerate() {
        let fault =
            |message| vec![finding(&format!("cluster.hosts[{item}]"), message, "see docs/job.md, Hosts")];
        let parsed = parse_hosts(text).map_err(|f| fault(format!("`{text}` {}", f.message)))?;
        if hosts.len() + parsed.len() > MAX_HOSTS {
            return Err(fault(format!("more than {MAX_HOSTS} hosts")));
        }
        hosts.extend(parsed.into_iter().map(|host| ClusterHost { host, slots: Slots::Auto }));
    }
    Ok(hosts)
}

fn read(file: &Path) -> Result<String, Vec<Finding>> {
    let fault = |message: String, hint: &str| finding("cluster.hosts", message, hint);
    let shown = file.display();
    let mut text = String::new();
    let read = File::open(file).and_then(|f| f.take(MAX_HOSTFILE as u64 + 1).read_to_string(&mut text));
    if let Err(error) = read {
        let message = format!("the hostfile {shown} can't be read: {error}");
        return Err(vec![fault(message, "its path is relative to `run.workdir`")]);
    }
    if text.len() > MAX_HOSTFILE {
        return Err(vec![fault(format!("the hostfile {shown} is larger than 4 MiB"), "is it a hostfile?")]);
    }
    Ok(text)
}

fn parse(file: &Path, text: &str) -> Result<Vec<ClusterHost>, Vec<Finding>> {
    let hosts = parse_hostfile(text).map_err(|faults| {
        let one = |f: contract::hosts::LineFault| {
            let message = format!("the hostfile {}:{}:{}: {}", file.display(), f.line, f.column, f.message);
            finding("cluster.hosts", message, "a line is `host slots=N`, as DeepSpeed and Open MPI have it")
        };
        faults.into_iter().take(MOST_TOLD).map(one).collect::<Vec<_>>()
    })?;
    let host = |h: contract::hosts::FileHost| ClusterHost {
        host: h.host,
        slots: h.slots.map_or(Slots::Auto, Slots::Count),
    };
    Ok(hosts.into_iter().map(host).collect())
}

fn finding(path: &str, message: String, hint: &str) -> Finding {
    Finding { path: path.to_owned(), message, hint: Some(hint.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, base: &Path) -> Result<String, Vec<Finding>> {
        let source = contract::Source::Text {
            name: "job.yaml".into(),
            text: format!("run: {{command: [a]}}\ncluster: {text}"),
        };
        let (job, ..) = contract::load(source, &[]).expect("a job");
        let hosts = hosts(&job.cluster, base)?;
        let one = |h: &ClusterHost| format!("{}={:?}", h.host, h.slots);
        Ok(hosts.map_or("local".to_owned(), |hosts| hosts.iter().map(one).collect::<Vec<_>>().join(" ")))
    }

    #[test]
    fn hosts_of_a_job() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("hosts"), "a slots=2\nb slots=1 # one\n").expect("a file");
        for (text, expected) in [
            ("{}", "local"),
            ("{hosts: [x, 'me@n[1-2]:22']}", "x=Auto me@n1:22=Auto me@n2:22=Auto"),
            ("{hosts: {file: hosts}}", "a=Count(2) b=Count(1)"),
            ("{hosts: {file: hosts}, include: 'a:1'}", "a=These([1])"),
            ("{hosts: [x, y], exclude: [x]}", "y=Auto"),
        ] {
            assert_eq!(found(text, dir.path()).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn mistakes_say_where() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("bad"), "a slots=2\na slots=1\nb x\n").expect("a file");
        for (text, path, part) in [
            ("{hosts: {file: none}}", "cluster.hosts", "none can't be read"),
            ("{hosts: {file: bad}}", "cluster.hosts", "bad:2:1: a is there already, on line 1"),
            ("{hosts: [a], include: [b]}", "cluster.include[0]", "`b`"),
            ("{include: [b]}", "cluster.include", "it names none"),
        ] {
            let findings = found(text, dir.path()).expect_err(text);
            assert!(findings[0].path == path && findings[0].message.contains(part), "{findings:?}");
        }
    }
}
