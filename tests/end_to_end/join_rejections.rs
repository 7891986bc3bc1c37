//! Tests that launch, started on one of several nodes, never silently runs a separate job there.
use crate::support::{JobDirectory, output_to_text, parse_rejection};
use std::fs;

/// Runs `launch ARGS…` with these environment variables, and returns the exit code and the code of
/// the error.
fn expect_error(variables: &[(&str, &str)], args: &[&str]) -> (i32, String) {
    let job_dir = JobDirectory::new();
    let mut command = job_dir.launch_command(args);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = output_to_text(&output);
    let code = text.split("error[").nth(1).and_then(|rest| rest.split(']').next());
    (output.status.code().unwrap_or(-1), code.unwrap_or_else(|| panic!("no error: {text}")).to_owned())
}

#[test]
fn a_process_that_is_one_node_of_several_joins_or_fails() {
    let torchrun = [("PET_NNODES", "4"), ("PET_NODE_RANK", "1"), ("PET_MASTER_ADDR", "pod-0")];
    let operator = [("WORLD_SIZE", "4"), ("RANK", "1"), ("MASTER_ADDR", "pod-0"), ("MASTER_PORT", "23456")];
    let pod = [("JOB_COMPLETION_INDEX", "1")];
    let mpi =
        [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "1")];
    let worker = [("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")];
    for args in [&["run", "--", "true"][..], &["job.yaml"], &["torchrun", "--no-python", "true"]] {
        for (variables, code) in [
            (&torchrun[..], "join-key-missing"),
            (&operator[..], "join-key-missing"),
            (&pod[..], "join-nodes-invalid"),
            (&mpi[..], "join-rendezvous-invalid"),
            (&worker[..], "join-started-per-worker"),
        ] {
            assert_eq!(expect_error(variables, args), (2, code.to_owned()), "{args:?} {variables:?}");
        }
    }
}

#[test]
fn options_that_describe_several_nodes_are_checked() {
    let torchrun = "torchrun --nnodes 2 --node-rank 1 --master-addr h --no-python true";
    let accelerate = "accelerate launch --num_machines 2 --machine_rank 1 --main_process_ip h --multi_gpu \
                      --num_processes 4 --no_python true";
    let hostfile = tempfile::NamedTempFile::new().unwrap();
    fs::write(hostfile.path(), "a slots=2\nb slots=2\n").unwrap();
    let deepspeed =
        format!("deepspeed --hostfile {} --no_ssh --node_rank 1 --no_python true", hostfile.path().display());
    for line in [torchrun, accelerate, &deepspeed] {
        let args: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(expect_error(&[], &args), (2, "join-key-missing".to_owned()), "{line}");
    }
    for (args, code) in [
        (&["run", "--nodes", "2", "--", "true"][..], "join-rendezvous-invalid"),
        (&["torchrun", "--nnodes", "2", "--no-python", "true"], "join-rendezvous-invalid"),
        (
            &["run", "--nodes", "2", "--node-rank", "2", "--rendezvous", "a", "--insecure", "--", "true"],
            "join-nodes-invalid",
        ),
        (&["run", "--node-rank", "1", "--rendezvous", "a", "--", "true"], "join-nodes-invalid"),
        (&["run", "--insecure", "--", "true"], "join-nodes-invalid"),
        (&["job.yaml", "--nodes", "2", "--set", "cluster.hosts=local"], "join-option-unsupported"),
        (
            &["job.yaml", "--nodes", "2", "--insecure", "--rendezvous", "a", "--node-rank", "0", "--detach"],
            "join-option-unsupported",
        ),
        (
            &[
                "job.yaml",
                "--nodes",
                "2",
                "--key-file",
                "none",
                "--rendezvous",
                "127.0.0.1",
                "--node-rank",
                "0",
            ],
            "join-key-invalid",
        ),
        (
            &["torchrun", "--nnodes", "2", "--node-rank", "1", "--no-python", "true"],
            "join-rendezvous-invalid",
        ),
        (
            &[
                "torchrun",
                "--nnodes",
                "2",
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "a:1",
                "--no-python",
                "true",
            ],
            "join-key-missing",
        ),
    ] {
        assert_eq!(expect_error(&[], args), (2, code.to_owned()), "{args:?}");
    }
}

#[test]
fn one_node_runs_alone() {
    let job_dir = JobDirectory::new();
    for (variables, args) in [
        (&[("PET_NNODES", "4"), ("PET_NODE_RANK", "1")][..], &["run", "--nodes", "1", "--", "true"][..]),
        (&[("PET_NNODES", "1"), ("PET_NODE_RANK", "0")], &["run", "--", "true"]),
        (&[], &["run", "--nodes", "1", "--set", "cluster.hosts=join", "--", "true"]),
        (&[("PET_NNODES", "4")], &["job.yaml", "--set", "cluster.hosts=local", "--set", "train.steps=1"]),
        (&[("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")], &["run", "--", "true"]),
    ] {
        let output = job_dir.launch_command(args).envs(variables.iter().copied()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", output_to_text(&output));
    }
}

#[test]
fn an_error_of_a_node_has_fields_for_programs() {
    let job_dir = JobDirectory::new();
    let output = job_dir
        .launch_command(&["--json", "manifest", "kubernetes", "job.yaml", "--image", "x"])
        .output()
        .unwrap();
    let (code, error) = parse_rejection(&output);
    assert_eq!((code, error["code"].as_str()), (2, Some("join-nodes-invalid")), "{error}");
}
