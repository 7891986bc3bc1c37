//! Tests the Kubernetes objects of a job: their structure, that they fit the schemas of Kubernetes
//! and JobSet, and that the job in them can be planned.
use crate::support::{self, JobDirectory, environment::isolated_command, output_to_text};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// The versions of Kubernetes whose schemas the objects must fit.
const KUBERNETES_VERSIONS: [&str; 2] = ["1.30", "1.37"];

/// Runs `launch manifest kubernetes job.yaml ARGS…`, and returns the list of objects.
fn list_objects(job_dir: &JobDirectory, args: &[&str]) -> Vec<Value> {
    let words =
        [&["--json", "manifest", "kubernetes", "job.yaml", "--image", "example.org/train:1"], args].concat();
    let output = job_dir.run_launch(&words);
    assert_eq!(output.status.code(), Some(0), "{}", output_to_text(&output));
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    list["items"].as_array().unwrap().clone()
}

/// Runs `launch manifest kubernetes job.yaml ARGS…`, and returns the objects by kind.
fn build_objects(job_dir: &JobDirectory, args: &[&str]) -> impl Fn(&str) -> Value {
    let items = list_objects(job_dir, args);
    move |kind| items.iter().find(|item| item["kind"] == kind).cloned().unwrap_or(Value::Null)
}

#[test]
fn a_job_set_has_the_pods_of_all_nodes() {
    let job_dir = JobDirectory::new();
    let objects = build_objects(
        &job_dir,
        &[
            "--nodes",
            "2:4",
            "--gpus",
            "8",
            "--rdma",
            "rdma/ib=2",
            "--volume",
            "data:/data",
            "--set",
            "run.restarts=3",
        ],
    );
    let set = objects("JobSet");
    assert_eq!(set["apiVersion"], "jobset.x-k8s.io/v1alpha2");
    assert_eq!(set["spec"]["failurePolicy"]["maxRestarts"], 3);
    let job = &set["spec"]["replicatedJobs"][0]["template"]["spec"];
    assert_eq!(
        (&job["completionMode"], &job["completions"], &job["parallelism"]),
        (&json!("Indexed"), &json!(4), &json!(4))
    );
    assert_eq!(job["backoffLimit"], 12);
    let pod = &job["template"]["spec"];
    assert_eq!(
        (&pod["restartPolicy"], &pod["terminationGracePeriodSeconds"]),
        (&json!("Never"), &json!(600))
    );
    let container = &pod["containers"][0];
    assert_eq!(container["resources"]["limits"], json!({"nvidia.com/gpu": 8, "rdma/ib": 2}));
    assert_eq!(container["securityContext"]["capabilities"]["add"], json!(["IPC_LOCK"]));
    assert_eq!(
        container["env"],
        json!([
            {"name": "LAUNCH_NODES", "value": "2:4"},
            {"name": "LAUNCH_RENDEZVOUS", "value": "tiny-node-0-0.tiny:29400"},
            {"name": "LAUNCH_KEY_FILE", "value": "/etc/launch/key/key"},
            {
                "name": "LAUNCH_BATCH_JOB",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"}},
            },
        ])
    );
    assert_eq!(
        container["command"],
        json!(["launch", "run", "/etc/launch/job/job.yaml", "--set=run.restarts=3"])
    );
    let volumes = pod["volumes"].as_array().unwrap();
    assert!(volumes.contains(&json!({"name": "shm", "emptyDir": {"medium": "Memory"}})), "{volumes:?}");
    assert!(
        volumes.contains(&json!({"name": "key", "secret": {"secretName": "tiny-key", "defaultMode": 256}}))
    );
    let key = objects("Secret")["stringData"]["key"].as_str().unwrap().to_owned();
    assert_eq!(key.len(), 64);
    let again = build_objects(&job_dir, &["--nodes", "4"])("Secret");
    assert_ne!(again["stringData"]["key"], json!(key), "each manifest has a new key");
    assert_eq!(objects("ConfigMap")["data"]["job.yaml"], crate::support::TINY_JOB);
    assert_eq!(objects("Service"), Value::Null, "the JobSet controller creates it");
}

#[test]
fn an_indexed_job_has_a_headless_service() {
    let job_dir = JobDirectory::new();
    let objects = build_objects(&job_dir, &["--kind", "job", "--nodes", "3", "--namespace", "research"]);
    let (job, service) = (objects("Job"), objects("Service"));
    assert_eq!(
        (&job["metadata"]["namespace"], &job["metadata"]["name"]),
        (&json!("research"), &json!("tiny"))
    );
    let pod = &job["spec"]["template"]["spec"];
    assert_eq!((&pod["subdomain"], &service["metadata"]["name"]), (&json!("tiny"), &json!("tiny")));
    assert_eq!(
        (&service["spec"]["clusterIP"], &service["spec"]["publishNotReadyAddresses"]),
        (&json!("None"), &json!(true))
    );
    assert_eq!(
        service["spec"]["selector"]["app.kubernetes.io/instance"],
        job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/instance"]
    );
    assert_eq!(pod["containers"][0]["env"][1]["value"], "tiny-0.tiny:29400");
    assert_eq!(
        pod["containers"][0]["env"][3],
        json!({
            "name": "LAUNCH_BATCH_JOB",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}},
        })
    );
    assert_eq!(job["spec"]["backoffLimit"], 0, "a job without restarts is not retried");
}

#[test]
fn a_pod_of_a_program_has_the_time_of_all_its_signals() {
    let job_dir = JobDirectory::new();
    for (run, seconds) in [("", 75), (", stop_signal: SIGUSR1, stop_timeout: 90s", 165)] {
        let job = format!("name: tiny\nrun: {{command: [\"true\"], grace_period: 45s{run}}}\n");
        std::fs::write(job_dir.path("job.yaml"), job).unwrap();
        let job = build_objects(&job_dir, &["--kind", "job", "--nodes", "2"])("Job");
        assert_eq!(job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], seconds, "{run}");
    }
}

#[test]
fn the_batch_script_is_that_of_sbatch() {
    let job_dir = JobDirectory::new();
    let [manifest, sbatch] = [&["manifest", "slurm", "job.yaml"][..], &["sbatch", "--print", "job.yaml"]]
        .map(|args| job_dir.run_launch(args));
    assert_eq!(output_to_text(&manifest), output_to_text(&sbatch));
    assert!(output_to_text(&manifest).starts_with("#!/bin/bash"), "{}", output_to_text(&manifest));
}

/// Checks that the command fails if it cannot read the job file a second time, instead of waiting
/// for another writer of a pipe.
#[test]
fn a_job_from_a_pipe_is_rejected() {
    let job_dir = JobDirectory::new();
    let pipe = job_dir.path("pipe.yaml");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let writer = std::thread::spawn(move || fs::write(pipe, "run: {command: [\"true\"]}\n").unwrap());
    let output = job_dir.run_launch(&[
        "manifest",
        "kubernetes",
        "pipe.yaml",
        "--image",
        "example.org/train:1",
        "--nodes",
        "2",
    ]);
    writer.join().unwrap();
    let text = output_to_text(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("error[job-file-unreadable]: cannot read pipe.yaml"), "{text}");
}

/// Returns the errors that the schemas of Kubernetes and JobSet find in `objects`.
fn validate_objects(python: &Path, job_dir: &JobDirectory, objects: &[Value]) -> Vec<String> {
    fs::write(job_dir.path("objects.json"), Value::from(objects).to_string()).unwrap();
    let mut command = isolated_command(python, Path::new(&job_dir.path("")));
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/validate_manifests.py"));
    let output = command.arg("objects.json").args(KUBERNETES_VERSIONS).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", output_to_text(&output)))
}

#[test]
fn objects_fit_the_schemas_of_kubernetes_and_jobset() {
    let test = "join_manifests::objects_fit_the_schemas_of_kubernetes_and_jobset";
    let Some(python) = support::find_kubernetes_python_or_skip(test) else { return };
    let job_dir = JobDirectory::new();
    let line = "--nodes 2:4 --gpus 8 --gpu-resource amd.com/gpu --rdma rdma/ib=2 --cpus 16 --memory 64Gi --shm 8Gi \
               --volume data:/data --workdir /data/job --namespace research --set run.restarts=3";
    let options: Vec<&str> = line.split_whitespace().collect();
    for kind in ["jobset", "job"] {
        for given in [&["--nodes", "3"][..], &options] {
            let objects = list_objects(&job_dir, &[&["--kind", kind], given].concat());
            assert_eq!(validate_objects(&python, &job_dir, &objects), [""; 0], "{kind} {given:?}");
        }
    }
    // The validator finds mistakes in every object, also in the template within a JobSet.
    for (kind, path, value) in [
        ("JobSet", "/spec/failurePolicy/maxRestarts", json!("3")),
        ("JobSet", "/spec/replicatedJobs/0/unknown", json!(1)),
        ("JobSet", "/spec/replicatedJobs/0/template/spec/template/spec/restartPolice", json!("Never")),
        ("Secret", "/stringData/key", json!(7)),
        ("ConfigMap", "/datum", json!({})),
    ] {
        let mut objects = list_objects(&job_dir, &options);
        let object = objects.iter_mut().find(|object| object["kind"] == kind).unwrap();
        let (parent, name) = path.rsplit_once('/').unwrap();
        object.pointer_mut(parent).unwrap()[name] = value;
        let errors = validate_objects(&python, &job_dir, &objects);
        assert!(errors.len() == 1 && errors[0].starts_with(kind), "{path}: {errors:?}");
    }
}
