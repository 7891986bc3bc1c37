//! torchrun's arguments as a job.
mod arguments;

use super::{Beside, Draft, Imported, Refused, hostfile, unnamed_hosts, wording};
use arguments::{Given, read};
use contract::{Problem, job::quoted, problem::Place};

/// torchrun's own defaults where they differ from what a job has.
const SIGNALS: &str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";

/// Arguments that a job has no use for, with the value that asks for nothing and the reason.
const LEFT_OUT: &[(&str, &str, &str)] = &[
    ("rdzv-backend", "static", "launch assigns the ranks itself"),
    ("rdzv-endpoint", "", "launch assigns the ranks itself, and hosts the store on the first host"),
    ("rdzv-conf", "", "launch assigns the ranks itself"),
    ("monitor-interval", "0.1", "launch learns at once of a worker's end"),
    ("start-method", "spawn", "workers are programs, which are started as such"),
    ("event-log-handler", "null", "`launch events` shows what happened"),
    ("role", "default", "there is one role, `default`"),
    ("redirects", "0", "each rank's output is in its log, and that of `run.logs.show` on the console"),
    ("tee", "0", "each rank's output is in its log, and that of `run.logs.show` on the console"),
    ("log-line-prefix-template", "", "lines have `[rank N]` before them, or nothing (`run.logs.prefix`)"),
    ("duplicate-stdout-filters", "", "`launch logs --grep` finds lines"),
    ("duplicate-stderr-filters", "", "`launch logs --grep` finds lines"),
    ("node-rank", "", "one launch starts all hosts; ranks follow the order of `cluster.hosts`"),
    ("master-addr", "127.0.0.1", "`MASTER_ADDR` is the first host's address"),
    ("local-addr", "", "hosts are named in `cluster.hosts`"),
    ("logs-specs", "", "logs are launch's own"),
];

/// Arguments (those after `torchrun`) as a job.
pub(crate) fn torchrun(args: &[String], beside: &Beside<'_>) -> Result<Imported, Refused> {
    let refused = |message: String| {
        let place = Place::File { file: "torchrun".to_owned() };
        let hint = Some("write them as after `torchrun`: -- --nproc-per-node 2 train.py".to_owned());
        vec![Problem { path: String::new(), place, message, hint }]
    };
    let mut given = read(args).map_err(refused)?;
    check(&given).map_err(refused)?;
    let mut draft = Draft::default();
    draft.own("run.command", &wording::list(&command(&mut given)));
    hosts(&mut draft, &mut given, beside);
    workers(&mut draft, &mut given);
    ends(&mut draft, &mut given);
    logs(&mut draft, &mut given);
    if let Some(name) = given.value("rdzv-id").filter(|id| id != "none") {
        draft.wish("--rdzv-id", "name", quoted(&name));
    }
    let standalone = given.flag("standalone");
    for (name, nothing, why) in LEFT_OUT {
        let Some(value) = given.value(name).filter(|value| value != nothing) else { continue };
        if !(standalone && name.starts_with("rdzv-")) {
            draft.not_carried(&format!("--{name}"), format!("{why} (it is {})", value.escape_debug()), "");
        }
    }
    draft.finish("torchrun's arguments")
}

fn command(given: &mut Given) -> Vec<String> {
    let before: &[&str] = match (given.flag("module"), given.flag("no-python")) {
        (_, true) => &[],
        (true, false) => &["python", "-m"],
        (false, false) => &["python"],
    };
    // torchrun runs such a script inside of its own Python; to the script that is the same
    given.flag("run-path");
    before.iter().map(|word| (*word).to_owned()).chain(given.program.iter().cloned()).collect()
}

/// What torchrun itself would refuse.
fn check(given: &Given) -> Result<(), String> {
    type Fits = fn(&str) -> bool;
    let count: Fits = |text| text.parse::<u32>().is_ok();
    let seconds: Fits = |text| text.parse::<f64>().is_ok_and(|s| s >= 0.0 && s.is_finite());
    let workers: Fits =
        |text| ["auto", "gpu", "cpu", "xpu"].contains(&text) || text.parse::<u32>().is_ok_and(|n| n > 0);
    let kinds: [(&str, Fits, &str); 7] = [
        ("nnodes", |text| range(text).is_some(), "a number of hosts, or a range such as 1:4"),
        ("nproc-per-node", workers, "a number of workers, auto, gpu, cpu or xpu"),
        ("max-restarts", count, "a number of restarts"),
        ("node-rank", count, "a number of a host, from 0"),
        ("master-port", |text| text.parse::<u16>().is_ok(), "a port, from 0 to 65535"),
        ("monitor-interval", seconds, "a number of seconds"),
        ("shutdown-timeout", count, "a whole number of seconds"),
    ];
    for (name, fits, needed) in kinds {
        if let Some(value) = given.shown(name).filter(|value| !fits(value)) {
            return Err(format!("`--{name}` needs {needed}, not `{}`", value.escape_debug()));
        }
    }
    Ok(())
}

/// The fewest and the most hosts.
fn range(text: &str) -> Option<(u64, u64)> {
    let (low, high) = text.split_once(':').unwrap_or((text, text));
    low.parse().ok().zip(high.parse().ok()).filter(|(low, high)| *low > 0 && low <= high)
}

/// `--nnodes 4` or `1:4`.
fn hosts(draft: &mut Draft, given: &mut Given, beside: &Beside<'_>) {
    if let Some(file) = beside.hostfile {
        hostfile(draft, "--hostfile", file);
    }
    let Some(nodes) = given.value("nnodes") else { return };
    let Some((low, high)) = range(&nodes) else { return };
    let named = beside.hostfile.is_some();
    if high > 1 && !named {
        unnamed_hosts(draft, "--nnodes", high);
    }
    match low == high {
        true if named => draft.wish("--nnodes", "cluster.use_hosts", high.to_string()),
        true => {}
        false if named || low == 1 => draft.wish("--nnodes", "run.min_hosts", low.to_string()),
        false => {
            let why = format!("at least {low} hosts are wanted, and nothing names them");
            draft.not_carried(
                "--nnodes",
                why,
                &format!("give `run.min_hosts: {low}` beside `cluster.hosts`"),
            );
        }
    }
}

/// `--nproc-per-node`: a number, `auto`, `gpu` or `cpu`.
fn workers(draft: &mut Draft, given: &mut Given) {
    const FROM: &str = "--nproc-per-node";
    let (path, devices) = ("cluster.workers_per_host", "cluster.devices");
    match given.value("nproc-per-node").as_deref() {
        None => draft.own(path, "1"),
        Some("gpu") => {
            draft.wish(FROM, devices, "cuda");
            draft.wish(FROM, path, "auto");
        }
        Some("auto") => {
            draft.wish(FROM, path, "auto");
            draft.note(FROM, "on hosts without a GPU torchrun starts a worker for each CPU, launch one", "");
        }
        Some("cpu") => {
            draft.wish(FROM, devices, "cpu");
            draft.own(path, "1");
            draft.not_carried(FROM, "a worker for each CPU of a host", "write how many: `workers_per_host`");
        }
        Some(other) => draft.wish(FROM, path, wording::count(other)),
    }
    if given.flag("virtual-local-rank") {
        draft.wish("--virtual-local-rank", "run.visible_devices", "one");
    }
    let Some(binding) = given.value("numa-binding") else { return };
    let (bind, near) = match binding.as_str() {
        "node" => ("numa", None),
        "socket" => ("numa", Some("a NUMA node, which may be less than a socket")),
        "core-complex" => ("cores", Some("equal shares of the cores")),
        _ => ("cores", None),
    };
    draft.wish("--numa-binding", "run.bind", bind);
    if let Some(near) = near {
        draft.note("--numa-binding", format!("`{binding}` becomes {near}"), "");
    }
}

/// Restarts, signals, and how workers end.
fn ends(draft: &mut Draft, given: &mut Given) {
    if let Some(restarts) = given.value("max-restarts").filter(|n| n != "0") {
        draft.wish("--max-restarts", "run.restarts", wording::count(&restarts));
    }
    if let Some(seconds) = given.value("shutdown-timeout") {
        draft.wish("--shutdown-timeout", "run.grace", quoted(&format!("{seconds}s")));
    }
    if let Some(port) = given.value("master-port").filter(|port| port != "0") {
        draft.wish("--master-port", "cluster.master_port", wording::count(&port));
    }
    let Some(signals) = given.value("signals-to-handle").filter(|s| s != SIGNALS) else { return };
    for signal in signals.split(',').map(str::trim).filter(|s| !SIGNALS.split(',').any(|own| own == *s)) {
        match signal {
            "SIGUSR1" | "SIGUSR2" => {
                let path = "run.signals";
                let both = signals.contains("SIGUSR1") && signals.contains("SIGUSR2");
                let yaml = match both {
                    true => "{SIGUSR1: save_and_stop, SIGUSR2: save_and_stop}".to_owned(),
                    false => format!("{{{signal}: save_and_stop}}"),
                };
                draft.wish("--signals-to-handle", path, yaml);
            }
            other => {
                let why = format!("launch doesn't pass on `{}`", other.escape_debug());
                draft.not_carried(
                    "--signals-to-handle",
                    why,
                    "`run.signals` has SIGUSR1, SIGUSR2 and SIGTERM",
                );
            }
        }
    }
}

fn logs(draft: &mut Draft, given: &mut Given) {
    if let Some(dir) = given.value("log-dir") {
        let dir = format!("{}/{{name}}/{{run}}", dir.trim_end_matches('/'));
        draft.wish("--log-dir", "run.logs.dir", quoted(&dir));
    }
    match given.value("local-ranks-filter").filter(|ranks| !ranks.is_empty()) {
        Some(ranks) => {
            let ranks: Vec<String> = ranks.split(',').map(|rank| wording::count(rank.trim())).collect();
            draft.wish("--local-ranks-filter", "run.logs.show", format!("[{}]", ranks.join(", ")));
        }
        None => draft.note("run.logs.show", "the console shows rank 0, where torchrun shows all", ""),
    }
}
