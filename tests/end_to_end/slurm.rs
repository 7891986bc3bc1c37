//! Tests jobs in a real Slurm (tests/slurm/cluster): allocations of every kind, time limits, lost
//! nodes, and remaining processes.
//!
//! Only one cluster exists at a time. Each test waits for a lock, and removes its cluster even if
//! the test fails.
use crate::support::{assert_snapshot, output_to_text};
use cluster::{SlurmCluster, wait_until};
use serde_json::Value;
use std::{collections::BTreeSet, fs};

mod attach;
mod cluster;
mod packet_capture;
mod preemption;
mod replacement;
mod requeue;

/// Returns the only `failure` event in the output of `launch --json`. Ignores lines of other
/// programs.
#[track_caller]
fn expect_failure_event(text: &str) -> Value {
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut failures: Vec<Value> = events.filter(|event| event["event"] == "failure").collect();
    assert_eq!(failures.len(), 1, "one failure: {text}");
    failures.remove(0)
}

#[test]
fn programs_run_in_allocations_of_every_kind() {
    let gpus = [4, 4, 4, 2, 0];
    let Some(cluster) = SlurmCluster::start_with_gpus("programs_run_in_allocations_of_every_kind", &gpus)
    else {
        return;
    };
    let report_rank = "echo $(hostname) $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $WORLD_SIZE $MASTER_ADDR $SLURM_STEP_NODELIST $SLURM_ARRAY_TASK_ID > rank.$SLURM_JOB_ID.$RANK";
    cluster.write_program_job(
        "{nodes: 4, extra: [\"--array=0-1\"]}",
        "env: {}\ncluster: {workers_per_host: 2}",
        report_rank,
    );
    // sbatch, as an array of two
    let job = cluster.run_on_node_successfully("h0", "./launch sbatch job.yaml");
    wait_until(
        "the array's end",
        || cluster.describe_job(&job),
        || cluster.run_on_node_successfully("h0", "squeue -h").is_empty().then_some(()),
    );
    let reports: Vec<String> = fs::read_dir(cluster.shared_path(""))
        .unwrap()
        .flatten()
        .map(|e| e.file_name().into_string().unwrap())
        .filter(|n| n.starts_with("rank."))
        .collect();
    assert_eq!(reports.len(), 16, "{reports:?}\n{}", cluster.describe_job(&job));
    let words = |text: String| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let net = fs::read_to_string(cluster.dir.join("net")).unwrap();
    for rank in 0..8 {
        let (host, local) = (rank / 2 + 1, rank % 2);
        let expected = format!("h{host} {local}/2 {}/4 8 {}.2 h[1-4]", host - 1, net.trim());
        assert_eq!(words(cluster.read_shared_file(&format!("rank.{job}.{rank}")))[..6], words(expected));
    }
    // salloc, which places the requested tasks on the nodes
    cluster.write_program_job("{}", "env: {}", report_rank);
    let alloc = cluster.run_on_node("h0", "salloc -Q -N3 -n4 ./launch job.yaml");
    assert!(alloc.status.success(), "{}", output_to_text(&alloc));
    let job = cluster.run_on_node_successfully("h0", "ls rank.* | cut -d. -f2 | sort -n | tail -1");
    for rank in 0..4 {
        let report = words(cluster.read_shared_file(&format!("rank.{job}.{rank}")));
        let (_, hosts) = report[2].split_once('/').unwrap();
        assert_eq!((hosts, report[3].as_str()), ("3", "4"), "{report:?}");
    }
    // a heterogeneous job of two groups
    let het = "#!/bin/bash\n#SBATCH -N1 -n1 -o het.out\n#SBATCH hetjob\n#SBATCH -N2 -n4 --ntasks-per-node=2\nexec ./launch job.yaml\n";
    fs::write(cluster.shared_path("het.sh"), het).unwrap();
    let ran = cluster.run_on_node("h0", "sbatch --wait --parsable het.sh");
    assert!(ran.status.success(), "{}{}", output_to_text(&ran), cluster.read_shared_file("het.out"));
    let job = String::from_utf8_lossy(&ran.stdout).trim().to_owned();
    let reports = cluster.run_on_node_successfully("h0", &format!("cat rank.{job}.*"));
    assert_eq!(reports.lines().count(), 5, "{reports}");
    for expected in ["h1 0/1 0/3 5 ", "h2 1/2 1/3 5 ", "h3 1/2 2/3 5 "] {
        assert!(reports.lines().any(|line| line.starts_with(expected)), "{expected}: {reports}");
    }
    // GPUs per task on nodes with different numbers of tasks: a worker sees all GPUs of its node
    let gpus = "echo $CUDA_VISIBLE_DEVICES > gpus.$(hostname)";
    cluster.write_program_job("{}", "env: {}\ncluster: {workers_per_host: 1}", gpus);
    let ran = cluster.run_on_node("h0", "salloc -Q -N2 -n5 --gpus-per-task=1 ./launch job.yaml");
    assert!(ran.status.success(), "{}", output_to_text(&ran));
    assert_eq!(
        (cluster.read_shared_file("gpus.h1").trim(), cluster.read_shared_file("gpus.h2").trim()),
        ("0,1,2,3", "0")
    );
    check_gpus_requested_in_total(&cluster);
    check_exclusive_nodes_with_unequal_gpus(&cluster);
    check_exclusive_node_without_gpus(&cluster);
    check_jobs_that_share_a_node(&cluster);
    check_step_variables(&cluster);
    check_step_options_and_activation(&cluster);
    cluster.assert_nothing_left();
}

/// Checks that a job with a total number of GPUs has one rank for each GPU, although Slurm gives
/// the nodes different numbers of GPUs.
fn check_gpus_requested_in_total(cluster: &SlurmCluster) {
    let report = "echo $(hostname) $LOCAL_RANK/$LOCAL_WORLD_SIZE $CUDA_VISIBLE_DEVICES > total.$RANK";
    cluster.write_program_job("{}", "env: {}\ncluster: {devices: cuda}", report);
    let ran = cluster.run_on_node("h0", "salloc -Q -N2 --gpus=5 ./launch job.yaml");
    assert!(ran.status.success(), "{}", output_to_text(&ran));
    let lines = cluster.run_on_node_successfully("h0", "cat total.*");
    let expected: Vec<String> = (0..4).map(|rank| format!("h1 {rank}/4 0,1,2,3")).collect();
    assert_eq!(lines.lines().collect::<Vec<_>>(), [expected, vec!["h2 0/1 0".into()]].concat());
}

/// Checks that a job that has whole nodes (`--exclusive`) without a request for GPUs has one rank
/// for each GPU, although the node of the batch script has more GPUs than the other one.
fn check_exclusive_nodes_with_unequal_gpus(cluster: &SlurmCluster) {
    let report = "echo $(hostname) $LOCAL_RANK/$LOCAL_WORLD_SIZE $CUDA_VISIBLE_DEVICES > whole.$RANK";
    cluster.write_program_job("{}", "env: {}\ncluster: {devices: cuda}", report);
    let submit = "sbatch --wait -Q --exclusive -o whole.out --wrap './launch job.yaml'";
    let ran = cluster.run_on_node("h0", &format!("{submit} -N2 -w 'h[3-4]'"));
    assert!(ran.status.success(), "{}", cluster.read_shared_file("whole.out"));
    let ranks = |host: &str, gpus: &[u32], devices: &str| -> Vec<String> {
        gpus.iter().map(|rank| format!("{host} {rank}/{} {devices}", gpus.len())).collect()
    };
    let lines = cluster.run_on_node_successfully("h0", "cat whole.*[0-9]");
    let expected = [ranks("h3", &[0, 1, 2, 3], "0,1,2,3"), ranks("h4", &[0, 1], "0,1")].concat();
    assert_eq!(lines.lines().collect::<Vec<_>>(), expected);
}

/// Checks that a node without GPUs does not get the GPU numbers of the node of the batch script, in
/// a job that has whole nodes (`--exclusive`), and that `launch` asks Slurm once for the numbers of
/// GPUs.
fn check_exclusive_node_without_gpus(cluster: &SlurmCluster) {
    let devices = "${CUDA_VISIBLE_DEVICES-unset} ${ROCR_VISIBLE_DEVICES-unset}";
    cluster.write_program_job("{}", "env: {}", &format!("echo $(hostname) {devices} > mixed.$RANK"));
    let count = "#!/bin/sh\necho $@ >> /shared/scontrol.calls\nexec /usr/bin/scontrol \"$@\"\n";
    fs::create_dir(cluster.shared_path("bin")).unwrap();
    fs::write(cluster.shared_path("bin/scontrol"), count).unwrap();
    let script = format!("echo {devices} > mixed.batch; PATH=/shared/bin:$PATH ./launch job.yaml");
    fs::write(cluster.shared_path("mixed.sh"), format!("#!/bin/bash\n{script}\n")).unwrap();
    let submit = "chmod 755 bin/scontrol; sbatch --wait -Q --exclusive -o mixed.out -N2 -w 'h[4-5]' mixed.sh";
    let ran = cluster.run_on_node("h0", submit);
    assert!(ran.status.success(), "{}", cluster.read_shared_file("mixed.out"));
    assert_eq!(cluster.read_shared_file("mixed.batch").trim(), "0,1 0,1", "Slurm selects the GPUs of h4");
    let lines = cluster.run_on_node_successfully("h0", "cat mixed.*[0-9]");
    let on_node = lines.lines().filter(|line| line.starts_with("h5")).collect::<Vec<_>>();
    assert_eq!(on_node, ["h5 unset unset"], "{lines}");
    let calls = cluster.read_shared_file("scontrol.calls");
    assert_eq!(calls.lines().filter(|call| call.contains("show job")).count(), 1, "{calls}");
}

/// Checks that the ranks of two jobs that share a node at the same time see only the GPUs of the
/// rank's job.
fn check_jobs_that_share_a_node(cluster: &SlurmCluster) {
    let report = "echo $CUDA_VISIBLE_DEVICES > part.$SLURM_JOB_ID.$RANK; \
                  while [ $(ls part.*.[01] | wc -l) -lt 4 ]; do sleep 0.1; done";
    let run = "env: {}\n  visible_devices: one\ncluster: {devices: cuda}";
    cluster.write_program_job("{}", run, report);
    let submit = "sbatch --wait -Q -w h1 --gres=gpu:2 -o part.%j.out --wrap './launch job.yaml'";
    let both = format!("{{ {submit} & first=$!; {submit} && wait $first; }}");
    let ran = cluster.run_on_node("h0", &both);
    assert!(ran.status.success(), "{}", cluster.run_on_node_successfully("h0", "cat part.*.out"));
    let devices = cluster.run_on_node_successfully("h0", "cat part.*.[01]");
    let mut numbers: Vec<&str> = devices.lines().collect();
    let (first, second) = numbers.split_at(2);
    assert!([["0", "1"], ["2", "3"]].iter().all(|pair| first == pair || second == pair), "{devices}");
    numbers.sort_unstable();
    assert_eq!(numbers, ["0", "1", "2", "3"]);
}

/// Checks that workers see the environment variables of the Slurm job, and see those of the agent's
/// task only if the job sets `slurm.step_variables`.
fn check_step_variables(cluster: &SlurmCluster) {
    cluster.write_program_job("{}", "env: {PMI_RANK: mine}", "env > environment");
    for (set, is_visible) in [("", false), ("--set slurm.step_variables=true", true)] {
        let ran = cluster.run_on_node("h0", &format!("salloc -Q -N1 ./launch job.yaml {set}"));
        assert!(ran.status.success(), "{}", output_to_text(&ran));
        let environment = cluster.read_shared_file("environment");
        let is_set = |name: &str| environment.lines().any(|line| line.starts_with(&format!("{name}=")));
        assert!(is_set("SLURM_JOB_ID") && environment.contains("PMI_RANK=mine"), "{environment}");
        for name in ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"] {
            assert_eq!(is_set(name), is_visible, "{name} {set}: {environment}");
        }
    }
}

/// Checks that `slurm.step_options` reach srun, and that nodes activate the environments of the
/// job.
fn check_step_options_and_activation(cluster: &SlurmCluster) {
    fs::write(cluster.shared_path("prolog"), "#!/bin/sh\necho export FROM_PROLOG=prolog\n").unwrap();
    fs::write(cluster.shared_path("env.sh"), "export FROM_SCRIPT=\"$FROM_PROLOG script\"\n").unwrap();
    cluster.run_on_node_successfully("h0", "chmod 755 prolog");
    cluster.write_program_job("{}", "env: {}", "echo $FROM_SCRIPT > activated.$(hostname)");
    let set =
        "--set run.activate='{script: env.sh}' --set \"slurm.step_options=[--task-prolog=$PWD/prolog]\"";
    let ran = cluster.run_on_node("h0", &format!("salloc -Q -N2 ./launch job.yaml {set}"));
    assert!(ran.status.success(), "{}", output_to_text(&ran));
    for host in ["h1", "h2"] {
        assert_eq!(cluster.read_shared_file(&format!("activated.{host}")).trim(), "prolog script");
    }
}

/// Sorts the lines of a message that srun and slurmstepd write at the same time.
fn sort_message_lines(message: &str) -> String {
    let Some((sentence, output)) = message.rsplit_once("controller: ") else { return message.to_owned() };
    let mut lines: Vec<&str> = output.split(" | ").collect();
    lines.sort_unstable();
    format!("{sentence}controller: {}", lines.join(" | "))
}

/// Checks that `launch`, started once on each node of a Slurm step, forms one run if it has a key,
/// and otherwise rejects a program without a job file.
fn check_one_launch_per_node(cluster: &SlurmCluster) {
    cluster.run_on_node_successfully("h0", "seq 100 > key && chmod 600 key");
    let program = "-- sh -c 'echo $RANK of $WORLD_SIZE, task $SLURM_PROCID > joined.$RANK'";
    let without = cluster.run_on_node("h0", &format!("srun -N2 -n2 ./launch run {program}"));
    assert!(output_to_text(&without).contains("join-key-missing"), "{}", output_to_text(&without));
    let joined = cluster.run_on_node("h0", &format!("srun -N2 -n2 ./launch run --key-file key {program}"));
    assert!(joined.status.success(), "{}", output_to_text(&joined));
    for rank in 0..2 {
        let text = cluster.read_shared_file(&format!("joined.{rank}"));
        assert!(text.starts_with(&format!("{rank} of 2, task")), "{text}");
    }
}

#[test]
fn wrong_uses_of_an_allocation_are_rejected_with_help() {
    let Some(cluster) = SlurmCluster::start("wrong_uses_of_an_allocation_are_rejected_with_help", 2) else {
        return;
    };
    cluster.write_program_job("{}", "env: {}", "echo ran on $(hostname)");
    // `launch check` inspects all nodes by a job step, and ends it
    let checked = cluster.run_on_node_successfully("h0", "salloc -Q -N2 ./launch check job.yaml --json");
    let checked: Value = serde_json::from_str(&checked).unwrap();
    let names: Vec<&str> = checked["hosts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|h| h["node"]["hostname"].as_str().unwrap())
        .collect();
    assert_eq!((names, &checked["ok"]), (vec!["h1", "h2"], &true.into()), "{checked:#}");
    let mut messages = String::new();
    let mut append = |failure: &Value| {
        let diagnostic = &failure["diagnostics"][0];
        let message = sort_message_lines(diagnostic["message"].as_str().unwrap());
        messages += &format!("{}: {message}\n  help: {}\n", failure["code"], failure["help"]);
    };
    let per_task = cluster.run_on_node("h0", "srun -N2 -n2 -K0 -o task-%t.json ./launch job.yaml --json");
    assert!(!per_task.status.success(), "{}", output_to_text(&per_task));
    let failure = expect_failure_event(&cluster.read_shared_file("task-0.json"));
    assert_eq!(failure["code"], "slurm-started-per-task", "{failure}");
    append(&failure);
    check_one_launch_per_node(&cluster);
    let outside = cluster.run_on_node("h0", "./launch job.yaml --json --set cluster.hosts=slurm");
    assert_eq!(outside.status.code(), Some(3), "{}", output_to_text(&outside));
    let failure = expect_failure_event(&output_to_text(&outside));
    assert_eq!(failure["code"], "slurm-allocation-missing", "{failure}");
    append(&failure);
    // one node only has the executable
    let script = "mkdir -p /opt/local && cp launch /opt/local/ && cat > local.sh <<'E'\n#!/bin/bash\nexec /opt/local/launch job.yaml $ARGS\nE\n";
    cluster.run_on_node_successfully("h1", script);
    let missing = cluster.run_on_node("h0", "ARGS=--json sbatch --wait -Q -N2 -o missing.out local.sh");
    assert!(!missing.status.success(), "{}", output_to_text(&missing));
    let failure = expect_failure_event(&cluster.read_shared_file("missing.out"));
    append(&failure);
    assert_snapshot(&cluster.dir, "rejected_in_an_allocation", &messages, &[]);
    assert_eq!(failure["diagnostics"][0]["code"], "slurm-executable-missing", "{failure}");
    let copied = cluster.run_on_node(
        "h0",
        "ARGS='--set slurm.bcast=true --set run.logs.show=[0,1]' sbatch --wait -Q -N2 -o copied.out local.sh",
    );
    let log = cluster.read_shared_file("copied.out");
    assert!(copied.status.success() && log.contains("ran on h1") && log.contains("ran on h2"), "{log}");
    assert_eq!(cluster.run_on_node_successfully("h2", "ls /tmp"), "", "the copy was not removed");
    cluster.assert_nothing_left();
}

#[test]
fn a_failure_ends_all_processes_on_every_node_and_is_reported() {
    let Some(cluster) = SlurmCluster::start("a_failure_ends_all_processes_on_every_node_and_is_reported", 3)
    else {
        return;
    };
    // each rank leaves a process in a separate session
    let script = "setsid sleep 1000 & echo up > up.$RANK; while [ ! -e go ]; do sleep 0.05; done; [ $RANK = 2 ] && exit 9; exec sleep 1000";
    cluster.write_program_job("{nodes: 3, requeues: 0}", "grace_period: 5s", script);
    let submit = |cluster: &SlurmCluster| {
        for file in ["up.0", "up.1", "up.2", "go"] {
            _ = fs::remove_file(cluster.shared_path(file));
        }
        let job = cluster.run_on_node_successfully("h0", "./launch sbatch job.yaml");
        let up = || (0..3).all(|rank| cluster.shared_path(&format!("up.{rank}")).exists()).then_some(());
        wait_until("the start", || cluster.describe_job(&job), up);
        job
    };
    let job = submit(&cluster);
    fs::write(cluster.shared_path("go"), "").unwrap();
    cluster.wait_for_job_end(&job, "FAILED");
    let failure = cluster.expect_last_failure("test");
    assert_eq!((&failure["reason"]["code"], &failure["host"]), (&9.into(), &"h3".into()), "{failure}");
    cluster.assert_nothing_left();

    // Slurm ends the tasks of a killed srun
    let job = submit(&cluster);
    cluster.run_on_node_successfully("h1", "pkill -KILL -o -x srun");
    cluster.wait_for_job_end(&job, "FAILED");
    let failure = cluster.expect_last_failure("test");
    assert_eq!(failure["diagnostics"][0]["code"], "slurm-step-failed", "{failure}");
    cluster.assert_nothing_left();

    // scancel sends SIGTERM to the program
    let job = submit(&cluster);
    cluster.run_on_node_successfully("h0", &format!("scancel {job}"));
    cluster.wait_for_job_end(&job, "CANCELLED");
    cluster.assert_nothing_left();
}

#[test]
fn jobs_save_at_the_time_limit_and_at_scancel_and_resume() {
    let Some(cluster) = SlurmCluster::start("jobs_save_at_the_time_limit_and_at_scancel_and_resume", 5)
    else {
        return;
    };
    // meanwhile a program on another node reaches its real time limit
    let script = "[ -e saved ] && exit 0; trap 'touch saved; exit 0' TERM; while :; do sleep 0.1; done";
    cluster.write_program_job("{nodes: 1, time: 1m, signal_time: 10s}", "grace_period: 8s", script);
    fs::rename(cluster.shared_path("job.yaml"), cluster.shared_path("limited.yaml")).unwrap();
    let limited = cluster.run_on_node_successfully("h0", "./launch sbatch limited.yaml");
    // and another one its limit without a signal in advance
    let script = "trap 'exit 0' TERM; while :; do sleep 0.1; done";
    cluster.write_program_job("{}", "grace_period: 8s", script);
    fs::rename(cluster.shared_path("job.yaml"), cluster.shared_path("unannounced.yaml")).unwrap();
    let submit = "sbatch --parsable -w h5 -t 1 -o unannounced.out --wrap";
    let launch = "./launch unannounced.yaml --set name=unannounced";
    let unannounced = cluster.run_on_node_successfully("h0", &format!("{submit} '{launch}'"));
    let expected = cluster.write_training_job(4, 400);
    let job = cluster.run_on_node_successfully("h0", "./launch sbatch job.yaml");
    let begun = || (cluster.read_last_step("tiny") >= 10).then_some(());
    wait_until("the first steps", || cluster.describe_job(&job), begun);
    // the signal that Slurm sends to the batch script before the limit (--signal=B:USR1@…)
    cluster.run_on_node_successfully("h0", &format!("scancel -b -s USR1 {job}"));
    let again = || {
        (cluster.read_job_field(&job, "Restarts") == "1"
            && cluster.read_job_field(&job, "JobState") == "RUNNING")
            .then_some(())
    };
    wait_until("the requeue", || cluster.describe_job(&job), again);
    let stopped = cluster.read_last_step("tiny");
    assert!(stopped < 400, "the run completed before the signal");
    wait_until(
        "more steps",
        || cluster.describe_job(&job),
        || (cluster.read_last_step("tiny") > stopped).then_some(()),
    );
    // scancel signals every process of the job, which saves and ends
    cluster.run_on_node_successfully("h0", &format!("scancel {job}"));
    cluster.wait_for_job_end(&job, "CANCELLED");
    cluster.assert_nothing_left();
    let resumes = |cluster: &SlurmCluster| {
        cluster.read_events("tiny").iter().filter(|e| e["event"] == "resume").count()
    };
    let steps = cluster.read_last_step("tiny");
    let saved =
        cluster.read_events("tiny").iter().rev().find(|e| e["event"] == "checkpoint").unwrap()["step"]
            .clone();
    assert_eq!((resumes(&cluster), saved.as_u64()), (1, Some(steps)), "{}", cluster.describe_job(&job));
    let job = cluster.run_on_node_successfully("h0", "./launch sbatch job.yaml");
    cluster.wait_for_job_end(&job, "COMPLETED");
    assert_eq!(resumes(&cluster), 2, "{}", cluster.describe_job(&job));
    assert!(
        cluster.collect_step_bits("tiny") == expected,
        "the losses differ from those of an uninterrupted run"
    );
    cluster.wait_for_job_end(&limited, "COMPLETED");
    assert!(cluster.shared_path("saved").exists());
    assert_eq!(cluster.read_job_field(&limited, "Restarts"), "1", "{}", cluster.describe_job(&limited));
    cluster.wait_for_job_end(&unannounced, "TIMEOUT");
    for (name, reasons) in
        [("test", [].as_slice()), ("tiny", &["cancelled"]), ("unannounced", &["time-limit"])]
    {
        assert_eq!(cluster.read_end_reasons(name), reasons, "{name}");
    }
    cluster.assert_notices("unannounced", "notices_at_an_unannounced_time_limit");
    cluster.assert_notices("test", "notices_at_the_time_limit_of_a_program");
    cluster.assert_notices("tiny", "notices_at_the_time_limit_and_scancel");
    cluster.assert_nothing_left();
}

#[test]
fn a_job_that_loses_a_node_is_requeued_and_resumes() {
    let Some(cluster) = SlurmCluster::start("a_job_that_loses_a_node_is_requeued_and_resumes", 4) else {
        return;
    };
    // the loss of another node than that of the batch script: launch requeues the job
    let script = "echo $(hostname) >> up.$RANK; [ $(wc -l < up.$RANK) -gt 1 ] && exit 0; exec sleep 1000";
    cluster.write_program_job("{nodes: 3}", "grace_period: 5s", script);
    let job = cluster.run_on_node_successfully("h0", "./launch sbatch job.yaml");
    let up = || (0..3).all(|rank| cluster.shared_path(&format!("up.{rank}")).exists()).then_some(());
    wait_until("the start", || cluster.describe_job(&job), up);
    assert!(cluster.run_cluster_script(&["crash", "h3"]).status.success());
    cluster.wait_for_job_end(&job, "COMPLETED");
    assert_eq!(cluster.read_job_field(&job, "Restarts"), "1", "{}", cluster.describe_job(&job));
    cluster.assert_notices("test", "notices_of_a_lost_node");
    let ran = cluster.read_shared_file("up.2");
    assert_eq!(ran.lines().collect::<Vec<_>>(), ["h3", "h4"]);
    assert!(cluster.run_cluster_script(&["boot", "h3"]).status.success());

    // the loss of the node of the batch script: Slurm requeues the job
    let expected = cluster.write_training_job(2, 400);
    let net = fs::read_to_string(cluster.dir.join("net")).unwrap();
    let interface = format!("{}.0/24", net.trim());
    let set = format!("--set cluster.interface={interface}");
    let job =
        cluster.run_on_node_successfully("h0", &format!("./launch sbatch job.yaml {set} -- --exclude=h3"));
    let begun = || (cluster.read_last_step("tiny") >= 30).then_some(());
    wait_until("the first checkpoint", || cluster.describe_job(&job), begun);
    let node = cluster.read_job_field(&job, "BatchHost");
    assert!(cluster.run_cluster_script(&["crash", &node]).status.success());
    cluster.wait_for_job_end(&job, "COMPLETED");
    assert_ne!(cluster.read_job_field(&job, "Restarts"), "0", "{}", cluster.describe_job(&job));
    assert!(
        cluster.collect_step_bits("tiny") == expected,
        "the losses differ from those of an uninterrupted run"
    );
    // ranks listen on the requested interface
    let log = cluster.run_on_node_successfully("h0", "cat runs/tiny/2*/logs/rank-0.log");
    let lines = log.lines().filter(|line| line.contains(&format!("{}.", net.trim())));
    let address = regex::Regex::new(&format!(r"{}\.\d+(:\d+)?", net.trim().replace('.', r"\."))).unwrap();
    let lines: BTreeSet<String> = lines
        .map(|line| line.replace(&interface, "[NETWORK]"))
        .map(|line| address.replace_all(&line, "[ADDRESS]").into_owned())
        .collect();
    assert_snapshot(
        &cluster.dir,
        "listen_addresses",
        &lines.into_iter().collect::<Vec<_>>().join("\n"),
        &[(r"interface \S+,", "interface [NAME],")],
    );
}
