//! Reports conflicts between the keys of a job, such as a rendezvous port outside `cluster.ports`,
//! without reading data and without asking a host.
//!
//! A setting that cannot be honoured is an error. A setting without effect is an error if it would
//! mislead the user about the result or the safety of the run. Other settings without effect are
//! warnings. The rules of keys, which their declarations contain, cover the combinations of one key
//! with values of other keys. The functions of this module cover the rest.
mod train;

use self::train::check_train;
use crate::{
    env::is_probable_secret_name,
    key_table::KEYS,
    keys::{
        decoder::JobDecoder,
        key_info::{Condition, Rule},
    },
    secret_text::{find_secret_option, hide_secret_values},
    spec::{
        checkpoint::ResumeFrom,
        cluster::{CommBackend, DeviceSelection, MasterPort},
        job::JobSpec,
        run::VisibleDevices,
    },
    url_password::hide_url_passwords,
};
use diagnostic::{Severity, codes::job as codes};

/// Reports conflicts between the keys of a job, such as both `run.command` and `train`, after
/// job.yaml was decoded. Errors and warnings are reported to `d`. A check is skipped if decoding
/// already reported an error for a key that the check reads.
pub(crate) fn check_job(d: &mut JobDecoder, job: &JobSpec) {
    check_run_or_train(d, job);
    check_rules(d, job);
    check_devices(d, job);
    warn_about_late_stop(d, job);
    warn_about_secrets(d, job);
    if let Some(train) = &job.train {
        check_train(d, train);
    }
}

/// Checks a job against the rules in the declarations of its keys, such as "`momentum` has no
/// effect with AdamW", and reports violations. If several rules of a key apply, only the first one
/// is reported.
fn check_rules(d: &mut JobDecoder, job: &JobSpec) {
    let values = job.list_values();
    for key in KEYS.iter().filter(|key| !key.rules.is_empty()) {
        let rule = key
            .rules
            .iter()
            .filter(|rule| is_rule_checkable(d, rule))
            .find(|rule| values.meets_rule_conditions(rule));
        let Some(rule) = rule.filter(|_| d.sources.is_key_given(&key.path)) else { continue };
        let (message, help) = (values.format_rule_message(rule, &key.path), rule.format_help(key.name()));
        match rule.severity {
            Severity::Error => d.report_error(rule.code, &key.path, message, &help),
            _ => d.report_warning(rule.code, &key.path, message, &help),
        }
    }
}

/// Returns whether all keys on whose values a rule depends were decoded without errors, so that the
/// rule can be evaluated. A condition that only asks whether a key is given does not need a correct
/// value, except for `run.command`.
fn is_rule_checkable(d: &JobDecoder, rule: &Rule) -> bool {
    rule.when.iter().all(|condition| match condition {
        Condition::Given(key) | Condition::NotGiven(key) if *key != "run.command" => true,
        condition => d.are_keys_valid(&[condition.key_path()]),
    })
}

/// Checks that the job has exactly one of `run.command` and `train`.
fn check_run_or_train(d: &mut JobDecoder, job: &JobSpec) {
    let command = d.sources.is_key_given("run.command");
    if !d.are_keys_valid(&[""]) {
        return;
    }
    match (command, job.train.is_some()) {
        (false, false) => d.report_error(
            codes::JOB_NOTHING_TO_RUN,
            "",
            "the job has neither `run.command` nor `train`",
            "add `train` for the built-in training, or `run.command` for a program",
        ),
        (true, true) => d.report_error(
            codes::JOB_KEYS_CONFLICT,
            "run.command",
            "`run.command` and `train` are both given",
            "`train` runs the built-in training; remove one of the two",
        ),
        (true, false) => check_program_resume(d, job),
        (false, true) => {}
    }
}

/// Reports an error if a job with `run.command` sets `resume.from: auto` but not `checkpoint.dir`,
/// in which launch would search for checkpoints.
fn check_program_resume(d: &mut JobDecoder, job: &JobSpec) {
    const FROM_KEY: &str = "resume.from";
    const DIR_KEY: &str = "checkpoint.dir";
    let is_auto = d.sources.is_key_given(FROM_KEY) && job.resume.from == ResumeFrom::Auto;
    if d.are_keys_valid(&[FROM_KEY, DIR_KEY]) && is_auto && !d.sources.is_key_given(DIR_KEY) {
        let message = "`resume.from: auto` requires `checkpoint.dir` in a job with `run.command`";
        let help =
            "set `checkpoint.dir` to the directory that contains the program's checkpoint-N directories";
        d.report_error(codes::JOB_KEY_REQUIRED, FROM_KEY, message, help);
    }
}

/// Reports conflicts between the keys about devices, communication backend and ports, such as a
/// rendezvous port outside `cluster.ports`.
fn check_devices(d: &mut JobDecoder, job: &JobSpec) {
    const VISIBLE_KEY: &str = "run.visible_devices";
    const WORKERS_KEY: &str = "cluster.workers_per_gpu";
    const BACKEND_KEY: &str = "cluster.comm_backend";
    let cluster = &job.cluster;
    if d.are_keys_valid(&["run.command", "cluster.devices", VISIBLE_KEY])
        && job.run.command.is_some()
        && cluster.devices == DeviceSelection::Cpu
        && job.run.visible_devices == VisibleDevices::One
    {
        let message =
            "`run.visible_devices: one` gives each worker a GPU, but `cluster.devices: cpu` hides all GPUs";
        d.report_error(codes::JOB_KEYS_CONFLICT, VISIBLE_KEY, message, "remove one of them");
    }
    if let MasterPort::Fixed(port) = cluster.master_port
        && d.are_keys_valid(&["cluster.master_port", "cluster.ports"])
        && !cluster.ports.contains(port)
    {
        let message = format!("`cluster.master_port` is {port}, which is not among `cluster.ports`");
        d.report_error(codes::JOB_KEYS_CONFLICT, "cluster.master_port", message, "remove one of them");
    }
    let is_nccl = cluster.comm_backend == CommBackend::Nccl;
    if d.are_keys_valid(&["cluster.devices", WORKERS_KEY, BACKEND_KEY])
        && is_nccl
        && cluster.workers_per_gpu > 2
    {
        let message = format!(
            "`{BACKEND_KEY}: nccl` supports at most 2 workers on a GPU (1 before NCCL 2.30), `{WORKERS_KEY}` is {}",
            cluster.workers_per_gpu
        );
        let help = "use `auto` or `host`, or `cluster.workers_per_gpu: 2`";
        d.report_error(codes::JOB_KEYS_CONFLICT, BACKEND_KEY, message, help);
    }
}

/// Warns if a program may run longer after its stop signal (`run.stop_timeout` plus
/// `run.grace_period`) than Slurm leaves before the time limit (`slurm.signal_time`). Slurm then
/// ends the job, which is not requeued.
fn warn_about_late_stop(d: &mut JobDecoder, job: &JobSpec) {
    const SIGNAL_KEY: &str = "run.stop_signal";
    let keys = ["run.command", SIGNAL_KEY, "run.stop_timeout", "run.grace_period", "slurm.signal_time"];
    let end_ms = job.run.sigterm_delay_ms().saturating_add(job.run.grace_period_ms);
    if d.are_keys_valid(&keys)
        && job.run.command.is_some()
        && d.sources.is_key_given("slurm")
        && d.sources.is_key_given(SIGNAL_KEY)
        && end_ms > job.slurm.signal_time_ms
    {
        let message = format!(
            "`{SIGNAL_KEY}` lets a program run for {} s after a request to stop (`run.stop_timeout` and \
             `run.grace_period`), but the time limit follows after {} s (`slurm.signal_time`)",
            end_ms as f64 / 1000.0,
            job.slurm.signal_time_ms as f64 / 1000.0
        );
        let help = "raise `slurm.signal_time`, or lower `run.stop_timeout`";
        d.report_warning(codes::JOB_KEYS_CONFLICT, SIGNAL_KEY, message, help);
    }
}

/// Warns about probable secrets, such as passwords, that the job file contains in `run.env` or in
/// arguments of `run.command`.
fn warn_about_secrets(d: &mut JobDecoder, job: &JobSpec) {
    for (name, value) in &job.run.env {
        let (message, shown) = if is_probable_secret_name(name) && !value.is_empty() {
            (format!("`{name}` looks like a secret, and its value is written in the job"), "value as `***`")
        } else if hide_url_passwords(value) != **value {
            let message = format!("the URL in `{name}` contains a password, which is written in the job");
            (message, "password as `*`")
        } else if hide_secret_values(value) != *value {
            let message = format!("a part of `{name}` looks like a secret, which is written in the job");
            (message, "part as `*`")
        } else {
            continue;
        };
        d.report_warning(
            codes::JOB_SECRET_IN_FILE,
            &format!("run.env.{name}"),
            message,
            &format!("use `{name}: {{from_env: {name}}}` or `{{from_file: path}}`; plans show the {shown}"),
        );
    }
    if let Some(option) = job.run.command.as_deref().and_then(find_secret_option) {
        d.report_warning(
            codes::JOB_SECRET_IN_FILE,
            "run.command",
            format!(
                "the value of `{option}` looks like a secret, and every user of a host can list arguments"
            ),
            "pass the secret in `run.env`, with `{from_env: NAME}` or `{from_file: path}`; plans show the \
             argument as `***`",
        );
    }
}
