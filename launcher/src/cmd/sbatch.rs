//! `launch sbatch`: a job as a batch script for Slurm, submitted or only shown.
use super::plan::shell_words;
use crate::{
    cli::SbatchArgs,
    error::{Failure, Kind},
    report::plain,
    transport::submit,
};
use contract::{
    JobSpec, Problem, Source,
    job::{Hosts, SlurmSpec},
};
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Submits the job, or prints its script; the exit code.
pub(crate) fn run(args: &SbatchArgs, as_json: bool) -> u8 {
    let done = script(args).and_then(|script| match args.print {
        true => Ok(script.text()),
        false => send(&script, &args.options, as_json),
    });
    match done {
        Ok(text) => super::show(&text),
        Err(failure) => super::fail(&failure),
    }
}

/// A batch script and what it was made from.
#[derive(Debug)]
struct Script {
    name: String,
    slurm: SlurmSpec,
    /// Where the batch job's own output goes; `%j` is the job's number.
    output: PathBuf,
    /// The directory it was submitted from.
    chdir: PathBuf,
    /// The command that the script becomes.
    command: Vec<String>,
}

fn script(args: &SbatchArgs) -> Result<Script, Failure> {
    let file = args.job.display().to_string();
    let loaded = contract::load(Source::File(args.job.clone()), &args.set);
    let (job, map, _) = loaded.map_err(|problems| Failure::job(&file, problems))?;
    let refuse = |path: &str, message: String, hint: &str| {
        let place = map.locate(path);
        Failure::job(
            &file,
            vec![Problem { path: path.to_owned(), place, message, hint: Some(hint.to_owned()) }],
        )
    };
    if job.cluster.hosts == Hosts::Local && job.slurm.nodes > 1 {
        let message = format!("all but one of {} nodes would have nothing to do", job.slurm.nodes);
        return Err(refuse("cluster.hosts", message, "leave `cluster.hosts` out, or ask for one node"));
    }
    if matches!(job.cluster.hosts, Hosts::List(_) | Hosts::File(_)) {
        let message = "these hosts would be reached by ssh from the batch job, whose own nodes would have nothing to do";
        let hint = "leave `cluster.hosts` out, or add `--set cluster.hosts=slurm`";
        return Err(refuse("cluster.hosts", message.to_owned(), hint));
    }
    if !job.run.workdir.is_dir() {
        let message = format!("the directory `{}` doesn't exist", job.run.workdir.display());
        return Err(refuse("run.workdir", message, "it must be the same on all nodes"));
    }
    let absolute = |path: &Path| {
        let cannot =
            |e| Failure::new(Kind::Failed, format!("{} can't be made absolute", path.display())).cause(&e);
        std::path::absolute(path).map_err(cannot)
    };
    let executable = std::env::current_exe()
        .map_err(|e| Failure::new(Kind::Failed, "launch's own executable can't be found").cause(&e))?;
    let mut command =
        vec![text(&executable)?, "run".to_owned(), text(&absolute(&args.job)?)?, "--requeue".to_owned()];
    command.extend(args.set.iter().map(|set| format!("--set={set}")));
    if let Some(set) = args.set.iter().find(|set| set.contains(char::is_control)) {
        let message = format!("--set {} can't be written into a script", set.escape_default());
        return Err(Failure::new(Kind::Usage, message).hint("write it into the job file"));
    }
    let script = Script {
        output: output_dir(&job).join("slurm-%j.out"),
        chdir: absolute(Path::new("."))?,
        name: job.name,
        slurm: job.slurm,
        command,
    };
    for path in [&script.chdir, &script.output] {
        one_word(path)?;
    }
    Ok(script)
}

/// The directory that all runs of the job have in common.
fn output_dir(job: &JobSpec) -> PathBuf {
    let template = job.run.logs.dir.replace("{name}", &job.name);
    let common: PathBuf = Path::new(&template)
        .components()
        .take_while(|component| !component.as_os_str().to_string_lossy().contains("{run}"))
        .collect();
    job.run.workdir.join(common)
}

fn text(path: &Path) -> Result<String, Failure> {
    let text = path.to_str().filter(|text| !text.contains('\n'));
    text.map(str::to_owned).ok_or_else(|| {
        Failure::new(Kind::Usage, format!("{} can't be written into a script", path.display()))
            .hint("use a path that is UTF-8 text without line breaks")
    })
}

/// Slurm's lines of options know quotes, but have no way to write these characters.
fn one_word(path: &Path) -> Result<(), Failure> {
    let path = text(path)?;
    // `%j` is ours; another `%` would be Slurm's to replace.
    let own = path.strip_suffix("slurm-%j.out").unwrap_or(&path);
    match own.chars().find(|c| matches!(c, '"' | '\'' | '\\' | '%') || c.is_control()) {
        None => Ok(()),
        Some(c) => Err(Failure::new(Kind::Usage, format!("Slurm can't be told of {path}: it has a `{c}`"))
            .hint("use a directory without quotes, backslashes and percent signs")),
    }
}

impl Script {
    /// The whole script.
    fn text(&self) -> String {
        let options: String = self.options().iter().map(|option| format!("#SBATCH {option}\n")).collect();
        format!(
            "#!/bin/bash\n{options}\n\
             # launch takes the place of this script's shell (exec): Slurm's signal before the time limit then reaches it.\n\
             exec {}\n",
            shell_words(&self.command)
        )
    }

    fn options(&self) -> Vec<String> {
        let s = &self.slurm;
        let mut options = vec![
            format!("--job-name={}", self.name),
            format!("--nodes={}", s.nodes),
            "--ntasks-per-node=1".to_owned(),
        ];
        options.extend(s.time_ms.map(|ms| format!("--time={}", time_limit(ms))));
        options.extend(s.partition.as_ref().map(|name| format!("--partition={name}")));
        options.extend(s.account.as_ref().map(|name| format!("--account={name}")));
        options.extend(s.qos.as_ref().map(|name| format!("--qos={name}")));
        options.extend((s.gpus_per_node > 0).then(|| format!("--gpus-per-node={}", s.gpus_per_node)));
        options.extend(s.cpus_per_task.map(|cpus| format!("--cpus-per-task={cpus}")));
        options.extend(s.mem.map(|bytes| format!("--mem={}M", bytes.div_ceil(1 << 20))));
        options.extend([
            // To the batch script alone (B): workers are told by launch, all at the same step.
            format!("--signal=B:USR1@{}", s.notice_ms.div_ceil(1000)),
            if s.requeues > 0 { "--requeue" } else { "--no-requeue" }.to_owned(),
            "--open-mode=append".to_owned(),
            format!("--output={}", quoted(&self.output)),
            format!("--chdir={}", quoted(&self.chdir)),
        ]);
        options.extend(s.extra.iter().cloned());
        options
    }
}

/// A path as a line of options has it.
fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    let plain = |c: char| !c.is_whitespace() && c != '#';
    if path.chars().all(plain) { path } else { format!("\"{path}\"") }
}

/// `days-hours:minutes:seconds`.
fn time_limit(ms: u64) -> String {
    let s = ms.div_ceil(1000);
    format!("{}-{:02}:{:02}:{:02}", s / 86_400, s / 3600 % 24, s / 60 % 60, s % 60)
}

fn send(script: &Script, options: &[String], as_json: bool) -> Result<String, Failure> {
    let dir = script.output.parent().unwrap_or(Path::new("."));
    // Slurm makes no directories: without this one the job would fail without a word.
    fs::create_dir_all(dir).map_err(|e| {
        Failure::new(Kind::Cluster, format!("the directory {} can't be made", dir.display())).cause(&e)
    })?;
    let job = submit(&script.text(), options)
        .map_err(|said| Failure::new(Kind::Cluster, format!("the job wasn't submitted: {said}")))?;
    let output = script.output.display().to_string().replace("%j", &job);
    if as_json {
        return Ok(format!("{}\n", json!({"job": job, "output": output})));
    }
    plain::say(&format!("{} is job {job}; its output goes to {output}\n", script.name));
    Ok(format!("{job}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(slurm: SlurmSpec) -> Script {
        Script {
            name: "demo".into(),
            slurm,
            output: "/w/my runs/demo/slurm-%j.out".into(),
            chdir: "/w".into(),
            command: ["/x/launch", "run", "/w/my job.yaml", "--requeue", "--set=a=it's"]
                .map(String::from)
                .into(),
        }
    }

    #[test]
    fn a_whole_script() {
        let slurm = SlurmSpec {
            partition: Some("gpu".into()),
            nodes: 4,
            time_ms: Some(90 * 60_000),
            gpus_per_node: 8,
            cpus_per_task: Some(96),
            mem: Some((64 << 30) + 1),
            extra: vec!["--constraint=a100".into()],
            ..SlurmSpec::default()
        };
        let want = "#!/bin/bash\n\
            #SBATCH --job-name=demo\n\
            #SBATCH --nodes=4\n\
            #SBATCH --ntasks-per-node=1\n\
            #SBATCH --time=0-01:30:00\n\
            #SBATCH --partition=gpu\n\
            #SBATCH --gpus-per-node=8\n\
            #SBATCH --cpus-per-task=96\n\
            #SBATCH --mem=65537M\n\
            #SBATCH --signal=B:USR1@120\n\
            #SBATCH --requeue\n\
            #SBATCH --open-mode=append\n\
            #SBATCH --output=\"/w/my runs/demo/slurm-%j.out\"\n\
            #SBATCH --chdir=/w\n\
            #SBATCH --constraint=a100\n\
            \n\
            # launch takes the place of this script's shell (exec): Slurm's signal before the time limit then reaches it.\n\
            exec /x/launch run '/w/my job.yaml' --requeue '--set=a=it'\\''s'\n";
        assert_eq!(sample(slurm).text(), want);
    }

    #[test]
    fn without_requeues_slurm_shall_not_either() {
        let text = sample(SlurmSpec { requeues: 0, ..SlurmSpec::default() }).text();
        assert!(text.contains("--no-requeue"), "{text}");
    }

    #[test]
    fn a_job_with_hosts_of_its_own_is_no_batch_job() {
        let dir = tempfile::tempdir().expect("a directory");
        let job = dir.path().join("job.yaml");
        let of = |hosts: &str| {
            fs::write(&job, format!("run: {{command: [a]}}\ncluster: {{hosts: {hosts}}}\n"))
                .expect("written");
            script(&SbatchArgs { job: job.clone(), set: Vec::new(), print: true, options: Vec::new() })
        };
        for hosts in ["[a, b]", "{file: hosts}"] {
            let refused = of(hosts).expect_err(hosts);
            assert!(format!("{refused:?}").contains("reached by ssh"), "{refused:?}");
        }
        assert!(of("slurm").is_ok() && of("auto").is_ok());
    }

    #[test]
    fn time_limits() {
        assert_eq!(time_limit(60_000), "0-00:01:00");
        assert_eq!(time_limit(86_400_000 + 3_600_001), "1-01:00:01");
    }

    #[test]
    fn paths_that_slurm_would_read_otherwise_are_refused() {
        assert!(one_word(Path::new("/a b/slurm-%j.out")).is_ok());
        for path in ["/a%b/slurm-%j.out", "/a\"b", "/a\\b", "/a\nb"] {
            assert!(one_word(Path::new(path)).is_err(), "{path}");
        }
    }

    #[test]
    fn output_goes_where_all_runs_lie() {
        let mut job = crate::testing::job();
        job.run.workdir = "/w".into();
        for (template, dir) in
            [("runs/{name}/{run}", "/w/runs/sample"), ("/logs/{run}-{name}", "/logs"), ("here", "/w/here")]
        {
            job.run.logs.dir = template.into();
            assert_eq!(output_dir(&job), PathBuf::from(dir));
        }
    }
}
