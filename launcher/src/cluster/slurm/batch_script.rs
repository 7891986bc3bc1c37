//! [`BatchScript`]: the Slurm batch script that runs a job.
use super::slurm_commands::submit_job;
use crate::{
    cluster::{
        batch_scheduler_types::{Submission, SubmitRequest},
        provider::ClusterError,
    },
    format::quote_shell_words,
};
use diagnostic::{
    Diagnostic,
    codes::{command, job as job_codes},
};
use jobspec::{ControllerLossAction, HostSelection, JobSpec, SlurmSpec, hide_secret_values};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The parts of a Slurm batch script (for `sbatch`) that runs a job with `launch run`: its sbatch
/// options and its command.
#[derive(Debug)]
pub(super) struct BatchScript {
    /// The name of the job.
    name: String,
    slurm: SlurmSpec,
    /// The file for the output of the batch job. Slurm replaces `%j` in the path by the job ID.
    output: PathBuf,
    /// The working directory of the batch job: the current directory of `launch sbatch`.
    chdir: PathBuf,
    /// The command `launch run …` that replaces the shell of the script (`exec`).
    command: Vec<String>,
}

/// Builds the Slurm batch script that runs a job with `launch run`. Fails if the job cannot run as
/// a batch job.
pub(super) fn build_batch_script(request: SubmitRequest<'_>) -> Result<BatchScript, ClusterError> {
    let SubmitRequest { job, job_file, set, .. } = request;
    check_job_is_batchable(&job).map_err(|error| ClusterError::Job(vec![error]))?;
    let executable = std::env::current_exe().map_err(|e| {
        let message = "cannot determine the path of launch's executable";
        Diagnostic::error(command::EXECUTABLE_UNKNOWN, message).with_cause(&e)
    })?;
    let mut words = vec![
        path_to_script_text(&executable)?,
        "run".to_owned(),
        path_to_script_text(&resolve_absolute_path(job_file)?)?,
        "--requeue".to_owned(),
    ];
    if job.run.on_controller_loss != Some(ControllerLossAction::Stop) {
        words.push("--replace-controller".to_owned());
    }
    words.extend(set.iter().map(|set| format!("--set={set}")));
    if let Some(hidden) = set.iter().map(|set| hide_secret_values(set)).find(|hidden| !set.contains(hidden)) {
        let message = format!("the batch script would contain the secret of `--set {hidden}`");
        let error = Diagnostic::error(job_codes::JOB_SECRET_IN_FILE, message)
            .with_subject("--set")
            .with_help("refer to the secret in the job file: `NAME: {from_file: path}`");
        return Err(error.into());
    }
    if let Some(set) = set.iter().find(|set| set.contains(char::is_control)) {
        let message = format!("`--set {}` contains a control character", set.escape_default());
        let error = Diagnostic::error(command::SBATCH_TEXT_UNSUPPORTED, message)
            .with_subject("--set")
            .with_help("write the value into the job file");
        return Err(error.into());
    }
    let script = BatchScript {
        output: find_output_dir(&job).join("slurm-%j.out"),
        chdir: resolve_absolute_path(Path::new("."))?,
        name: job.name,
        slurm: job.slurm,
        command: words,
    };
    for path in [&script.chdir, &script.output] {
        check_sbatch_option_path(path)?;
    }
    Ok(script)
}

/// Fails if a job cannot run from a Slurm batch script, for example because its hosts join
/// (`cluster.hosts: join`) or its working directory is missing.
fn check_job_is_batchable(job: &JobSpec) -> diagnostic::Result<()> {
    if job.cluster.hosts == HostSelection::Local && job.slurm.nodes > 1 {
        let message =
            format!("`cluster.hosts: local` would leave all but one of {} nodes idle", job.slurm.nodes);
        return Err(Diagnostic::error(command::SBATCH_HOSTS_UNSUPPORTED, message)
            .with_subject("cluster.hosts")
            .with_field("nodes", job.slurm.nodes)
            .with_help("remove `cluster.hosts`, or request one node"));
    }
    if job.cluster.hosts == HostSelection::Join {
        let message =
            "the batch script starts launch once, but `cluster.hosts: join` requires one on each node";
        return Err(Diagnostic::error(command::SBATCH_HOSTS_UNSUPPORTED, message)
            .with_subject("cluster.hosts")
            .with_help("remove `cluster.hosts`, or add `--set cluster.hosts=slurm`"));
    }
    if matches!(job.cluster.hosts, HostSelection::List(_) | HostSelection::File(_)) {
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

/// Converts a path that is relative to the current directory to an absolute path. Fails if the
/// current directory is not available.
fn resolve_absolute_path(path: &Path) -> diagnostic::Result<PathBuf> {
    std::path::absolute(path).map_err(|e| {
        let message = format!("cannot determine the absolute path of {}", path.display());
        Diagnostic::error(command::CURRENT_DIRECTORY_UNAVAILABLE, message).with_cause(&e)
    })
}

/// Returns the directory for the output file of the Slurm batch job, which is the part of
/// `run.logs.dir` that all runs of the job share.
///
/// This part precedes `{run}`.
fn find_output_dir(job: &JobSpec) -> PathBuf {
    let template = job.run.logs.dir.replace("{name}", &job.name);
    let common: PathBuf = Path::new(&template)
        .components()
        .take_while(|component| !component.as_os_str().to_string_lossy().contains("{run}"))
        .collect();
    job.run.workdir.join(common)
}

/// Returns a path as UTF-8 text that can be written into the Slurm batch script. Fails if the path
/// is not UTF-8 or has line breaks.
fn path_to_script_text(path: &Path) -> diagnostic::Result<String> {
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

/// Fails if a path contains characters that cannot be escaped in the `#SBATCH` lines of a batch
/// script, such as quotes.
fn check_sbatch_option_path(path: &Path) -> diagnostic::Result<()> {
    let path = path_to_script_text(path)?;
    // `%j` is intended. Slurm would replace any other `%`, too.
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
    /// Returns the text of the Slurm batch script, with its `#SBATCH` lines and the command that
    /// runs the job.
    pub(super) fn format_script(&self) -> String {
        let options: String =
            self.list_sbatch_options().iter().map(|option| format!("#SBATCH {option}\n")).collect();
        format!(
            "#!/bin/bash\n{options}\n\
             # exec replaces the shell, so that Slurm's signal before the time limit reaches launch.\n\
             exec {}\n",
            quote_shell_words(&self.command)
        )
    }

    /// Returns the sbatch options of the job for the `#SBATCH` lines of the script, one per line.
    /// The options of `slurm.extra` are at the end of the list.
    fn list_sbatch_options(&self) -> Vec<String> {
        let s = &self.slurm;
        let mut options = vec![
            format!("--job-name={}", self.name),
            format!("--nodes={}", s.nodes),
            "--ntasks-per-node=1".to_owned(),
        ];
        options.extend(s.time_ms.map(|ms| format!("--time={}", format_time_limit(ms))));
        options.extend(s.partition.as_ref().map(|name| format!("--partition={name}")));
        options.extend(s.account.as_ref().map(|name| format!("--account={name}")));
        options.extend(s.qos.as_ref().map(|name| format!("--qos={name}")));
        options.extend((s.gpus_per_node > 0).then(|| format!("--gpus-per-node={}", s.gpus_per_node)));
        options.extend(s.cpus_per_task.map(|cpus| format!("--cpus-per-task={cpus}")));
        options.extend(s.mem.map(|bytes| format!("--mem={}M", bytes.div_ceil(1 << 20))));
        options.extend([
            // `B:` limits the signal to the batch script, because launch requests the save from
            // all workers.
            format!("--signal=B:USR1@{}", s.signal_time_ms.div_ceil(1000)),
            if s.requeues > 0 { "--requeue" } else { "--no-requeue" }.to_owned(),
            "--open-mode=append".to_owned(),
            format!("--output={}", quote_sbatch_option_path(&self.output)),
            format!("--chdir={}", quote_sbatch_option_path(&self.chdir)),
        ]);
        options.extend(s.extra.iter().cloned());
        options
    }
}

/// Returns a path for an `#SBATCH` line of a batch script, in quotes if the path contains white
/// space or `#`.
fn quote_sbatch_option_path(path: &Path) -> String {
    let path = path.display().to_string();
    let is_plain = |c: char| !c.is_whitespace() && c != '#';
    if path.chars().all(is_plain) { path } else { format!("\"{path}\"") }
}

/// Formats a time limit in milliseconds as Slurm's `DAYS-HOURS:MINUTES:SECONDS`, rounded up to a
/// second.
fn format_time_limit(ms: u64) -> String {
    let s = ms.div_ceil(1000);
    format!("{}-{:02}:{:02}:{:02}", s / 86_400, s / 3600 % 24, s / 60 % 60, s % 60)
}

/// Creates the output directory of a Slurm batch job, and submits the script of the batch job with
/// `sbatch OPTIONS…`.
pub(super) fn submit_script(script: &BatchScript, options: &[String]) -> diagnostic::Result<Submission> {
    let dir = script.output.parent().unwrap_or(Path::new("."));
    // Slurm does not create directories: without this one the job would fail without any output.
    fs::create_dir_all(dir).map_err(|e| {
        let path = dir.display().to_string();
        Diagnostic::error(command::SBATCH_DIRECTORY_FAILED, format!("cannot create the directory {path}"))
            .with_subject(path)
            .with_cause(&e)
    })?;
    let id = submit_job(&script.format_script(), options)?;
    let output = script.output.display().to_string().replace("%j", &id);
    Ok(Submission::Queued { id, output })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_sample_script(slurm: SlurmSpec) -> BatchScript {
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
        assert_eq!(make_sample_script(slurm).format_script(), expected);
    }

    #[test]
    fn without_requeues_slurm_does_not_requeue_either() {
        let text = make_sample_script(SlurmSpec { requeues: 0, ..SlurmSpec::default() }).format_script();
        assert!(text.lines().any(|line| line == "#SBATCH --no-requeue"), "{text}");
    }

    #[test]
    fn a_job_with_its_own_hosts_is_rejected() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("job.yaml");
        let script_with_hosts = |hosts: &str| {
            let text = format!("run: {{command: [a]}}\ncluster: {{hosts: {hosts}}}\n");
            fs::write(&file, text).expect("written");
            let source = jobspec::JobSource::File(file.clone());
            let (job, ..) = jobspec::load_job(source, &[]).expect("a job");
            build_batch_script(SubmitRequest { job, job_file: &file, set: &[], options: &[], print: true })
        };
        for hosts in ["[a, b]", "{file: hosts}"] {
            let Err(ClusterError::Job(mistakes)) = script_with_hosts(hosts) else { panic!("{hosts}") };
            assert_eq!(mistakes[0].code(), command::SBATCH_HOSTS_UNSUPPORTED, "{hosts}");
        }
        assert!(script_with_hosts("slurm").is_ok() && script_with_hosts("auto").is_ok());
    }

    #[test]
    fn a_secret_is_not_written_to_the_batch_script() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("job.yaml");
        fs::write(&file, "run: {command: [a]}\n").expect("written");
        let build_with = |set: &str| {
            let set = [set.to_owned()];
            let source = jobspec::JobSource::File(file.clone());
            let (job, ..) = jobspec::load_job(source, &set).expect("a job");
            let request = SubmitRequest { job, job_file: &file, set: &set, options: &[], print: true };
            build_batch_script(request)
        };
        let Err(error) = build_with("run.env.HF_TOKEN=sesame") else { panic!("accepted") };
        let text = format!("{error:?}");
        assert!(text.contains("HF_TOKEN=******") && !text.contains("sesame"), "{text}");
        assert!(build_with("run.env.HF_TOKEN={from_env: A}").is_ok() && build_with("run.env.A=b").is_ok());
    }

    #[test]
    fn time_limits_have_the_format_of_slurm() {
        assert_eq!(format_time_limit(60_000), "0-00:01:00");
        assert_eq!(format_time_limit(86_400_000 + 3_600_001), "1-01:00:01");
    }

    #[test]
    fn paths_that_slurm_cannot_quote_are_rejected() {
        assert!(check_sbatch_option_path(Path::new("/a b/slurm-%j.out")).is_ok());
        for path in ["/a%b/slurm-%j.out", "/a\"b", "/a\\b", "/a\nb"] {
            assert!(check_sbatch_option_path(Path::new(path)).is_err(), "{path}");
        }
    }

    #[test]
    fn the_batch_output_is_stored_next_to_the_run_directories() {
        let mut job = crate::testing::sample_job();
        job.run.workdir = "/w".into();
        for (template, dir) in
            [("runs/{name}/{run}", "/w/runs/sample"), ("/logs/{run}-{name}", "/logs"), ("here", "/w/here")]
        {
            job.run.logs.dir = template.into();
            assert_eq!(find_output_dir(&job), PathBuf::from(dir));
        }
    }
}
