//! `launch sbatch`: writes a job as a Slurm batch script, and submits or prints it.
use super::{invalid_job, plan::shell_words};
use crate::{cli::SbatchArgs, report::plain, transport::submit_job};
use contract::{
    JobSpec, Source,
    job::{Hosts, SlurmSpec},
};
use diagnostic::{
    Diagnostic,
    codes::{command, job as job_codes},
};
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Submits the job, or prints its script.
pub(crate) fn run(args: &SbatchArgs, as_json: bool) -> diagnostic::Result<u8> {
    let script = batch_script(args)?;
    let text = match args.print {
        true => script.text(),
        false => submit_script(&script, &args.options, as_json)?,
    };
    super::print(&text)
}

/// A batch script.
#[derive(Debug)]
struct BatchScript {
    /// The name of the job.
    name: String,
    slurm: SlurmSpec,
    /// The file for the output of the batch job; `%j` stands for the job id.
    output: PathBuf,
    /// The working directory: the one in which `launch sbatch` runs.
    chdir: PathBuf,
    /// The command that replaces the shell of the script.
    command: Vec<String>,
}

fn batch_script(args: &SbatchArgs) -> diagnostic::Result<BatchScript> {
    let file = args.job.display().to_string();
    let loaded = contract::load(Source::File(args.job.clone()), &args.set);
    let (job, map, _) = loaded.map_err(|mistakes| invalid_job(&file, mistakes))?;
    check_job(&job).map_err(|error| invalid_job(&file, vec![map.locate(error)]))?;
    let executable = std::env::current_exe().map_err(|e| {
        let message = "cannot determine the path of launch's executable";
        Diagnostic::error(command::EXECUTABLE_UNKNOWN, message).with_cause(&e)
    })?;
    let mut words = vec![
        path_text(&executable)?,
        "run".to_owned(),
        path_text(&absolute_path(&args.job)?)?,
        "--requeue".to_owned(),
    ];
    words.extend(args.set.iter().map(|set| format!("--set={set}")));
    if let Some(set) = args.set.iter().find(|set| set.contains(char::is_control)) {
        let message = format!("`--set {}` contains a control character", set.escape_default());
        return Err(Diagnostic::error(command::SBATCH_TEXT_UNSUPPORTED, message)
            .with_subject("--set")
            .with_help("write the value into the job file"));
    }
    let script = BatchScript {
        output: output_dir(&job).join("slurm-%j.out"),
        chdir: absolute_path(Path::new("."))?,
        name: job.name,
        slurm: job.slurm,
        command: words,
    };
    for path in [&script.chdir, &script.output] {
        check_option_path(path)?;
    }
    Ok(script)
}

/// Rejects jobs that would leave allocated nodes idle, or have no working directory.
fn check_job(job: &JobSpec) -> diagnostic::Result<()> {
    if job.cluster.hosts == Hosts::Local && job.slurm.nodes > 1 {
        let message =
            format!("`cluster.hosts: local` would leave all but one of {} nodes idle", job.slurm.nodes);
        return Err(Diagnostic::error(command::SBATCH_HOSTS_UNSUPPORTED, message)
            .with_subject("cluster.hosts")
            .with_field("nodes", job.slurm.nodes)
            .with_help("remove `cluster.hosts`, or request one node"));
    }
    if matches!(job.cluster.hosts, Hosts::List(_) | Hosts::File(_)) {
        let message = "the batch job would reach these hosts over SSH and leave its own nodes idle";
        return Err(Diagnostic::error(command::SBATCH_HOSTS_UNSUPPORTED, message)
            .with_subject("cluster.hosts")
            .with_help("remove `cluster.hosts`, or add `--set cluster.hosts=slurm`"));
    }
    if !job.run.workdir.is_dir() {
        let message = format!("the directory `{}` does not exist", job.run.workdir.display());
        return Err(Diagnostic::error(job_codes::JOB_WORKDIR_INVALID, message)
            .with_subject("run.workdir")
            .with_help("use a directory that all nodes have"));
    }
    Ok(())
}

fn absolute_path(path: &Path) -> diagnostic::Result<PathBuf> {
    std::path::absolute(path).map_err(|e| {
        let message = format!("cannot determine the absolute path of {}", path.display());
        Diagnostic::error(command::CURRENT_DIRECTORY_UNAVAILABLE, message).with_cause(&e)
    })
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

/// A path as text for the script.
fn path_text(path: &Path) -> diagnostic::Result<String> {
    let text = path.to_str().filter(|text| !text.contains('\n'));
    text.map(str::to_owned).ok_or_else(|| {
        let path = path.display().to_string();
        Diagnostic::error(
            command::SBATCH_TEXT_UNSUPPORTED,
            format!("the path {path} cannot be part of a script"),
        )
        .with_subject(path)
        .with_help("use a path that is UTF-8 text without line breaks")
    })
}

/// Rejects paths with characters that cannot be escaped in `#SBATCH` lines.
fn check_option_path(path: &Path) -> diagnostic::Result<()> {
    let path = path_text(path)?;
    // `%j` is intended; Slurm would replace any other `%`.
    let without_id = path.strip_suffix("slurm-%j.out").unwrap_or(&path);
    let is_unsupported = |c: &char| matches!(c, '"' | '\'' | '\\' | '%') || c.is_control();
    match without_id.chars().find(is_unsupported) {
        None => Ok(()),
        Some(c) => {
            let message =
                format!("the path {path} contains `{}`, which Slurm cannot quote", c.escape_debug());
            Err(Diagnostic::error(command::SBATCH_TEXT_UNSUPPORTED, message)
                .with_subject(path.as_str())
                .with_help("use a directory without quotes, backslashes and percent signs"))
        }
    }
}

impl BatchScript {
    /// The text of the script.
    fn text(&self) -> String {
        let options: String =
            self.sbatch_options().iter().map(|option| format!("#SBATCH {option}\n")).collect();
        format!(
            "#!/bin/bash\n{options}\n\
             # exec replaces the shell, so that Slurm's signal before the time limit reaches launch.\n\
             exec {}\n",
            shell_words(&self.command)
        )
    }

    fn sbatch_options(&self) -> Vec<String> {
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
            // Only to the batch script (B): launch has all workers save at the same step.
            format!("--signal=B:USR1@{}", s.signal_time_ms.div_ceil(1000)),
            if s.requeues > 0 { "--requeue" } else { "--no-requeue" }.to_owned(),
            "--open-mode=append".to_owned(),
            format!("--output={}", quote_option(&self.output)),
            format!("--chdir={}", quote_option(&self.chdir)),
        ]);
        options.extend(s.extra.iter().cloned());
        options
    }
}

/// Quotes a path for an `#SBATCH` line, if necessary.
fn quote_option(path: &Path) -> String {
    let path = path.display().to_string();
    let is_plain = |c: char| !c.is_whitespace() && c != '#';
    if path.chars().all(is_plain) { path } else { format!("\"{path}\"") }
}

/// Formats a duration as `DAYS-HOURS:MINUTES:SECONDS`, rounded up to a second.
fn time_limit(ms: u64) -> String {
    let s = ms.div_ceil(1000);
    format!("{}-{:02}:{:02}:{:02}", s / 86_400, s / 3600 % 24, s / 60 % 60, s % 60)
}

/// Submits the script and returns the text for stdout: the job id.
fn submit_script(script: &BatchScript, options: &[String], as_json: bool) -> diagnostic::Result<String> {
    let dir = script.output.parent().unwrap_or(Path::new("."));
    // Slurm does not create directories: without this one the job would fail without any output.
    fs::create_dir_all(dir).map_err(|e| {
        let path = dir.display().to_string();
        Diagnostic::error(command::SBATCH_DIRECTORY_FAILED, format!("cannot create the directory {path}"))
            .with_subject(path)
            .with_cause(&e)
    })?;
    let job = submit_job(&script.text(), options)?;
    let output = script.output.display().to_string().replace("%j", &job);
    if as_json {
        return Ok(format!("{}\n", json!({"job": job, "output": output})));
    }
    plain::write_message(&format!("submitted {} as job {job}; its output goes to {output}\n", script.name));
    Ok(format!("{job}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(slurm: SlurmSpec) -> BatchScript {
        BatchScript {
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
    fn a_script_has_the_options_of_the_job() {
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
        let expected = "#!/bin/bash\n\
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
            # exec replaces the shell, so that Slurm's signal before the time limit reaches launch.\n\
            exec /x/launch run '/w/my job.yaml' --requeue '--set=a=it'\\''s'\n";
        assert_eq!(sample(slurm).text(), expected);
    }

    #[test]
    fn without_requeues_slurm_does_not_requeue_either() {
        let text = sample(SlurmSpec { requeues: 0, ..SlurmSpec::default() }).text();
        assert!(text.lines().any(|line| line == "#SBATCH --no-requeue"), "{text}");
    }

    #[test]
    fn a_job_with_its_own_hosts_is_rejected() {
        let dir = tempfile::tempdir().expect("a directory");
        let job = dir.path().join("job.yaml");
        let script_with_hosts = |hosts: &str| {
            fs::write(&job, format!("run: {{command: [a]}}\ncluster: {{hosts: {hosts}}}\n"))
                .expect("written");
            batch_script(&SbatchArgs { job: job.clone(), set: Vec::new(), print: true, options: Vec::new() })
        };
        for hosts in ["[a, b]", "{file: hosts}"] {
            let error = script_with_hosts(hosts).expect_err(hosts);
            assert_eq!(error.details()[0].code(), command::SBATCH_HOSTS_UNSUPPORTED, "{error}");
        }
        assert!(script_with_hosts("slurm").is_ok() && script_with_hosts("auto").is_ok());
    }

    #[test]
    fn time_limits_have_slurms_form() {
        assert_eq!(time_limit(60_000), "0-00:01:00");
        assert_eq!(time_limit(86_400_000 + 3_600_001), "1-01:00:01");
    }

    #[test]
    fn paths_that_slurm_cannot_quote_are_rejected() {
        assert!(check_option_path(Path::new("/a b/slurm-%j.out")).is_ok());
        for path in ["/a%b/slurm-%j.out", "/a\"b", "/a\\b", "/a\nb"] {
            assert!(check_option_path(Path::new(path)).is_err(), "{path}");
        }
    }

    #[test]
    fn the_output_is_next_to_the_run_directories() {
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
