use super::*;
use contract::Source;
use proptest::prelude::*;

fn job(text: &str) -> JobSpec {
    let source = Source::Text { name: "demo.yaml".to_owned(), text: text.to_owned() };
    contract::load(source, &[]).expect("a job").0
}

fn machine(cpus: &[u32], quota: Option<f64>) -> Facts {
    Facts { host: "here".to_owned(), cpus: cpus.to_vec(), quota, memory: 1 << 30, chosen: Vec::new() }
}

fn command(workers: u32) -> JobSpec {
    job(&format!(
        "cluster: {{workers_per_host: {workers}, master_port: 4000}}\nrun: {{command: [true], workdir: /w, env: {{A: b}}}}"
    ))
}

fn planned(job: &JobSpec, facts: &Facts) -> Plan {
    plan(job, facts, &RunId("R".to_owned())).expect("a plan")
}

#[test]
fn two_workers() {
    let plan = planned(&command(2), &machine(&[0, 1, 4, 5, 6], None));
    assert_eq!((plan.world, plan.run_dir.to_str()), (2, Some("/w/runs/demo/R")));
    assert!(plan.warnings.is_empty());
    let [node] = &plan.nodes[..] else { panic!("one node") };
    let [first, second] = &node.workers[..] else { panic!("two workers") };
    assert_eq!((&first.cpus[..], &second.cpus[..]), (&[0, 1][..], &[4, 5][..]));
    assert_eq!((second.rank, second.local_rank, second.local_world, second.threads), (1, 1, 2, 2));
    assert_eq!(second.log.to_str(), Some("/w/runs/demo/R/logs/rank-1.log"));
    let env: Vec<String> = second.env.iter().map(|(n, v)| format!("{n}={v}")).collect();
    assert_eq!(
        env,
        [
            "RANK=1",
            "LOCAL_RANK=1",
            "WORLD_SIZE=2",
            "LOCAL_WORLD_SIZE=2",
            "MASTER_ADDR=127.0.0.1",
            "MASTER_PORT=4000",
            "GROUP_RANK=0",
            "GROUP_WORLD_SIZE=1",
            "ROLE_RANK=1",
            "ROLE_WORLD_SIZE=2",
            "ROLE_NAME=default",
            "NODE_RANK=0",
            "LOCAL_SIZE=2",
            "CROSS_RANK=0",
            "CROSS_SIZE=1",
            "TORCHELASTIC_RUN_ID=R",
            "TORCHELASTIC_RESTART_COUNT=0",
            "TORCHELASTIC_MAX_RESTARTS=0",
            "TORCHELASTIC_USE_AGENT_STORE=True",
            "TORCHELASTIC_ERROR_FILE=/w/runs/demo/R/logs/rank-1.error.json",
            "OMP_NUM_THREADS=2",
            "PYTHONUNBUFFERED=1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
            "A=b"
        ]
    );
}

#[test]
fn more_workers_than_cpus_run_unbound_and_are_warned_about() {
    let plan = planned(&command(3), &machine(&[0, 1], None));
    assert!(plan.nodes[0].workers.iter().all(|w| w.cpus.is_empty() && w.threads == 1));
    assert_eq!(plan.warnings.len(), 1);
    assert_eq!(plan.warnings[0].path, "cluster.workers_per_host");
}

#[test]
fn a_time_limit_means_fewer_threads() {
    let plan = planned(&command(1), &machine(&[0, 1, 2, 3], Some(2.5)));
    assert_eq!((plan.nodes[0].workers[0].threads, plan.nodes[0].workers[0].cpus.len()), (2, 4));
    assert!(!planned(&command(3), &machine(&[0, 1, 2, 3], Some(2.0))).warnings.is_empty());
}

#[test]
fn the_job_may_set_the_threads() {
    let job = job("run: {command: [true], env: {OMP_NUM_THREADS: 3}}");
    let plan = planned(&job, &machine(&[0], None));
    let worker = &plan.nodes[0].workers[0];
    assert_eq!(worker.threads, 3);
    assert_eq!(worker.env.iter().filter(|(n, _)| n == "OMP_NUM_THREADS").count(), 1);
}

#[test]
fn the_users_own_environment_and_the_job_decide_before_launch() {
    let chosen = [("OMP_NUM_THREADS", "7"), ("PYTHONUNBUFFERED", "x")].map(|(n, v)| (n.into(), v.into()));
    let facts = Facts { chosen: chosen.to_vec(), ..machine(&[0, 1], None) };
    let values = |text: &str| {
        let env = planned(&job(text), &facts).nodes[0].workers[0].env.clone();
        let of = |name: &str| {
            let found: Vec<_> = env.iter().filter(|(n, _)| n == name).map(|(_, v)| v.clone()).collect();
            found.join(" and ")
        };
        ["OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCHELASTIC_USE_AGENT_STORE"].map(of)
    };
    assert_eq!(values("run: {command: [true]}"), ["7", "x", "True"]);
    let own = "cluster: {store: rank0}\nrun: {command: [true], env: {OMP_NUM_THREADS: 3}}";
    assert_eq!(values(own), ["3", "x", "False"]);
    assert_eq!(
        values("train: {data: {files: [a]}}"),
        ["2", "", ""],
        "the built-in runtime has its own rules"
    );
}

#[test]
fn threads_that_are_no_number_are_refused_where_they_would_be_ignored() {
    let facts = machine(&[0, 1], None);
    let program = job("run: {command: [true], env: {OMP_NUM_THREADS: '4,2'}}");
    assert_eq!(planned(&program, &facts).nodes[0].workers[0].threads, 2);
    let trained = job("run: {env: {OMP_NUM_THREADS: '4,2'}}\ntrain: {data: {files: [a]}}");
    let problems = plan(&trained, &facts, &RunId("R".to_owned())).expect_err("refused");
    assert_eq!(problems[0].path, "run.env.OMP_NUM_THREADS");
}

#[test]
fn an_absent_rank_is_warned_about() {
    let plan = planned(&job("run: {command: [true], logs: {show: [0, 2]}}"), &machine(&[0, 1], None));
    let paths: Vec<&str> = plan.warnings.iter().map(|w| w.path.as_str()).collect();
    assert_eq!(paths, ["run.logs.show[1]"]);
}

#[test]
fn a_port_that_is_not_given_is_left_open() {
    let plan = planned(&job("run: {command: [true]}"), &machine(&[0], None));
    assert!(plan.nodes[0].workers[0].env.contains(&("MASTER_PORT".to_owned(), "auto".to_owned())));
}

proptest! {
    #[test]
    fn shares_are_equal_and_disjoint(cpus in 1u32..200, workers in 1u32..300, quota in proptest::option::of(0.01f64..300.0)) {
        let facts = machine(&(0..cpus).collect::<Vec<_>>(), quota);
        let slots = place::cpu_slots(&facts, workers);
        prop_assert_eq!(slots.len(), workers as usize);
        let mut all: Vec<u32> = slots.iter().flat_map(|s| s.cpus.clone()).collect();
        let bound = all.len();
        all.dedup();
        prop_assert_eq!(all.len(), bound, "no CPU twice, ascending");
        for slot in &slots {
            prop_assert_eq!(slot.cpus.len() as u32, cpus / workers);
            prop_assert!(slot.threads >= 1 && slot.threads <= (slot.cpus.len() as u32).max(1));
        }
    }
}
