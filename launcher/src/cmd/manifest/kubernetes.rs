//! Builds the Kubernetes objects of a job: a JobSet or an Indexed Job with one pod for each node, a
//! headless Service, a Secret with the key of the nodes, and a ConfigMap with the job file.
use super::super::job_preparation::JobArgs;
use crate::private_files::open_regular_file;
use clap::{Args, ValueEnum};
use diagnostic::{
    Diagnostic,
    codes::{command, host, job as job_codes},
};
use jobspec::{HostSelection, JobSpec, MAX_JOB_BYTES, hide_secret_values, hosts::NodeCount};
use serde_json::{Map, Value, json};
use std::io::Read;

/// The directory in which a pod finds the job file.
const JOB_FILE_DIRECTORY: &str = "/etc/launch/job";
/// The directory in which a pod finds the key with which the nodes of the job authenticate each
/// other.
const KEY_DIRECTORY: &str = "/etc/launch/key";
/// The name of the replicated job in a JobSet, which is part of the names of its pods.
const REPLICATED_JOB_NAME: &str = "node";
/// The port at which the pod of node 0 listens for the other nodes.
const RENDEZVOUS_PORT: u16 = 29400;
/// The largest number of characters in a job's name with which the names of the job's pods are
/// still valid DNS labels.
const MAX_JOB_NAME_CHARS: usize = 40;
/// The time that a built-in training gets to save a checkpoint after SIGTERM, in seconds.
const BUILTIN_SAVE_SECONDS: u64 = 600;
/// The time that launch may take to end after the grace period of the workers, in seconds.
const SHUTDOWN_SECONDS: u64 = 30;

/// The kind of Kubernetes object that runs the pods of a job: a JobSet or an Indexed Job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum WorkloadKind {
    /// A JobSet, which requires the JobSet controller in the cluster.
    #[value(name = "jobset")]
    JobSet,
    /// An Indexed Job and a headless Service.
    #[value(name = "job")]
    Job,
}

/// Arguments of `launch manifest kubernetes`.
#[derive(Debug, Args)]
pub(super) struct KubernetesArgs {
    #[command(flatten)]
    pub(super) job: JobArgs,
    /// Container image, with launch in its PATH
    #[arg(long)]
    image: String,
    /// Kind of object that creates the pods
    #[arg(long, default_value = "jobset")]
    kind: WorkloadKind,
    /// Number of nodes, one pod each: N or MIN:MAX [default: cluster.join.nodes; required without
    /// this key]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(NodeCount))]
    nodes: Option<NodeCount>,
    /// Namespace of the objects [default: that of kubectl]
    #[arg(long)]
    namespace: Option<String>,
    /// GPUs of each pod
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpus: u32,
    /// Resource name of the GPUs
    #[arg(long, value_name = "NAME", default_value = "nvidia.com/gpu")]
    gpu_resource: String,
    /// RDMA devices of each pod, such as rdma/ib=1 or vpc.amazonaws.com/efa=4; repeatable
    #[arg(long, value_name = "NAME=N")]
    rdma: Vec<String>,
    /// CPUs that each pod requests, such as 8 [default: none]
    #[arg(long, value_name = "QUANTITY")]
    cpus: Option<String>,
    /// Memory that each pod requests, which is also its limit, such as 64Gi [default: none]
    #[arg(long, value_name = "QUANTITY")]
    memory: Option<String>,
    /// Limit of /dev/shm, such as 16Gi [default: no separate limit]
    #[arg(long, value_name = "QUANTITY")]
    shm: Option<String>,
    /// Persistent volume claim, and the path at which pods mount it; repeatable
    #[arg(long, value_name = "CLAIM:PATH")]
    volume: Vec<String>,
    /// Working directory of launch [default: that of the image]
    #[arg(long, value_name = "DIR")]
    workdir: Option<String>,
}

/// Builds the Kubernetes objects that run a job: a JobSet or an Indexed Job, and the Secret,
/// ConfigMap and Service that its pods need. Draws a new key. Fails if the job cannot run in pods.
pub(super) fn build_objects(args: &KubernetesArgs, job: &JobSpec) -> diagnostic::Result<Vec<Value>> {
    if !matches!(job.cluster.hosts, HostSelection::Auto | HostSelection::Join) {
        let message = "the pods of a job join each other, but `cluster.hosts` selects other hosts";
        return Err(Diagnostic::error(host::JOIN_OPTION_UNSUPPORTED, message)
            .with_subject("cluster.hosts")
            .with_help("remove the key, or add `--set cluster.hosts=join`"));
    }
    let nodes = args.nodes.or(job.cluster.join.nodes.map(NodeCount::from_exact_count)).ok_or_else(|| {
        Diagnostic::error(host::JOIN_NODES_INVALID, "the number of nodes is not known")
            .with_help("add `--nodes N`, or set `cluster.join.nodes`")
    })?;
    let text = read_job_file(args)?;
    let manifest = KubernetesManifestBuilder { args, job, nodes, name: make_object_name(&job.name) };
    let mut objects = vec![manifest.build_secret()?, manifest.build_config_map(&text)];
    let workload = manifest.build_job_spec()?;
    match args.kind {
        WorkloadKind::JobSet => objects.push(manifest.build_job_set(workload)),
        WorkloadKind::Job => {
            objects.push(manifest.build_service());
            objects.push(manifest.build_object("batch/v1", "Job", "", json!({"spec": workload})));
        }
    }
    Ok(objects)
}

/// Reads the job file, whose text becomes part of the manifest. Fails if the file is a pipe, from
/// which loading the job has already read the text, or if an override contains a secret.
fn read_job_file(args: &KubernetesArgs) -> diagnostic::Result<String> {
    let file = &args.job.job;
    let mut text = String::new();
    let read = open_regular_file(file).and_then(|file| file.take(MAX_JOB_BYTES).read_to_string(&mut text));
    read.map_err(|error| {
        super::super::output::path_error(job_codes::JOB_FILE_UNREADABLE, "cannot read", file, &error)
    })?;
    if let Some(set) = args.job.set.iter().find(|set| hide_secret_values(set) != **set) {
        let message = format!("the manifest would contain the secret of `--set {}`", hide_secret_values(set));
        return Err(Diagnostic::error(job_codes::JOB_SECRET_IN_FILE, message)
            .with_subject("--set")
            .with_help("refer to the secret in the job file: `NAME: {from_env: NAME}`, and set the variable in the pods"));
    }
    Ok(if text.ends_with('\n') { text } else { format!("{text}\n") })
}

/// Makes a valid name of Kubernetes objects from the name of a job.
fn make_object_name(name: &str) -> String {
    let lower = name.to_ascii_lowercase();
    let safe: String = lower
        .chars()
        .take(MAX_JOB_NAME_CHARS)
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    let safe = safe.trim_matches('-');
    match safe.chars().next() {
        Some(first) if first.is_ascii_alphabetic() => safe.to_owned(),
        Some(_) => format!("job-{safe}"),
        None => "job".to_owned(),
    }
}

/// What is needed to build the Kubernetes objects of one job: the job, its object name, its number
/// of nodes, and the command's options.
struct KubernetesManifestBuilder<'a> {
    args: &'a KubernetesArgs,
    job: &'a JobSpec,
    nodes: NodeCount,
    /// The name of the workload and of its Service.
    name: String,
}

impl KubernetesManifestBuilder<'_> {
    /// Returns a Kubernetes object of the given API version and kind, with the members of `content`
    /// and the job's name followed by `suffix`.
    fn build_object(&self, version: &str, kind: &str, suffix: &str, content: Value) -> Value {
        let mut metadata = json!({"name": format!("{}{suffix}", self.name), "labels": self.build_labels()});
        if let Some(namespace) = &self.args.namespace {
            metadata["namespace"] = json!(namespace);
        }
        let mut object = json!({"apiVersion": version, "kind": kind, "metadata": metadata});
        if let (Some(object), Value::Object(content)) = (object.as_object_mut(), content) {
            object.extend(content);
        }
        object
    }

    /// Returns the labels of the Kubernetes objects of the job.
    fn build_labels(&self) -> Value {
        json!({"app.kubernetes.io/instance": self.name, "app.kubernetes.io/managed-by": "launch"})
    }

    /// Builds the Kubernetes Secret with a new random key, with which the nodes of the job
    /// authenticate each other.
    fn build_secret(&self) -> diagnostic::Result<Value> {
        let mut bytes = [0u8; 32];
        getrandom::fill(&mut bytes).map_err(|error| {
            let message = "the system provides no random key for the nodes";
            Diagnostic::error(diagnostic::codes::run::RANDOM_UNAVAILABLE, message).with_cause(&error)
        })?;
        let key: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(self.build_object("v1", "Secret", "-key", json!({"type": "Opaque", "stringData": {"key": key}})))
    }

    /// Builds the Kubernetes ConfigMap that contains the job file.
    fn build_config_map(&self, text: &str) -> Value {
        self.build_object("v1", "ConfigMap", "-job", json!({"data": {"job.yaml": text}}))
    }

    /// Builds the headless Service that gives the pods of an Indexed Job their DNS names. The names
    /// resolve before the pods are ready, because pods become ready only after they have met.
    fn build_service(&self) -> Value {
        let spec = json!({
            "clusterIP": "None",
            "publishNotReadyAddresses": true,
            "selector": {"app.kubernetes.io/instance": self.name},
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
        });
        self.build_object("v1", "Service", "", json!({"spec": spec}))
    }

    /// Builds the Kubernetes JobSet that runs one Job with the spec `job_spec`. The JobSet's
    /// controller creates the Service.
    fn build_job_set(&self, job_spec: Value) -> Value {
        let rule = json!({
            "name": "no-retry",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
        });
        let spec = json!({
            "network": {"enableDNSHostnames": true, "subdomain": self.name, "publishNotReadyAddresses": true},
            "failurePolicy": {"maxRestarts": self.job.run.restarts, "rules": [rule]},
            "replicatedJobs": [{"name": REPLICATED_JOB_NAME, "replicas": 1, "template": {"spec": job_spec}}],
        });
        self.build_object("jobset.x-k8s.io/v1alpha2", "JobSet", "", json!({"spec": spec}))
    }

    /// Builds the spec of the Kubernetes Job, which has one pod for each node of the job.
    fn build_job_spec(&self) -> diagnostic::Result<Value> {
        let pods = self.nodes.max;
        // A lost node 0 ends the pods of all nodes. Kubernetes stores the limit in 32 bits.
        let limit = (u64::from(pods) * u64::from(self.job.run.restarts)).min(i32::MAX as u64);
        let ignore = |values: &[u8]| json!({"containerName": "launch", "operator": "In", "values": values});
        let rules = json!([
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            // A pod that was asked to end has saved and stopped the run. The next start resumes.
            {"action": "Ignore", "onExitCodes": ignore(&[143])},
            // launch has restarted the workers itself, or a restart would fail again.
            {"action": "FailJob", "onExitCodes": ignore(&[1, 2, 4])},
        ]);
        Ok(json!({
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimit": limit,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": self.build_labels()}, "spec": self.build_pod_spec()?},
        }))
    }

    /// Builds the spec of the Kubernetes pods that run the nodes of the job.
    fn build_pod_spec(&self) -> diagnostic::Result<Value> {
        let volumes = self.parse_volumes()?;
        let mut mounts = vec![
            json!({"name": "job", "mountPath": JOB_FILE_DIRECTORY, "readOnly": true}),
            json!({"name": "key", "mountPath": KEY_DIRECTORY, "readOnly": true}),
            json!({"name": "shm", "mountPath": "/dev/shm"}),
        ];
        let mut shm = json!({"medium": "Memory"});
        if let Some(limit) = &self.args.shm {
            shm["sizeLimit"] = json!(limit);
        }
        let mut pod_volumes = vec![
            json!({"name": "job", "configMap": {"name": format!("{}-job", self.name)}}),
            json!({"name": "key", "secret": {"secretName": format!("{}-key", self.name), "defaultMode": 0o400}}),
            json!({"name": "shm", "emptyDir": shm}),
        ];
        for (number, (claim, path)) in volumes.iter().enumerate() {
            let name = format!("claim-{number}");
            mounts.push(json!({"name": name, "mountPath": path}));
            pod_volumes.push(json!({"name": name, "persistentVolumeClaim": {"claimName": claim}}));
        }
        let mut spec = json!({
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.compute_grace_seconds(),
            "enableServiceLinks": false,
            "automountServiceAccountToken": false,
            "containers": [self.build_container(mounts)?],
            "volumes": pod_volumes,
        });
        if self.args.kind == WorkloadKind::Job {
            spec["subdomain"] = json!(self.name);
        }
        Ok(spec)
    }

    /// Builds the container of a pod, which runs `launch run` for one node of the job with the
    /// volume mounts `mounts`.
    fn build_container(&self, mounts: Vec<Value>) -> diagnostic::Result<Value> {
        let mut command =
            vec!["launch".to_owned(), "run".to_owned(), format!("{JOB_FILE_DIRECTORY}/job.yaml")];
        command.extend(self.args.job.set.iter().map(|set| format!("--set={set}")));
        let count = match self.nodes {
            NodeCount { min, max } if min < max => format!("{min}:{max}"),
            NodeCount { max, .. } => max.to_string(),
        };
        let first = match self.args.kind {
            WorkloadKind::JobSet => format!("{}-{REPLICATED_JOB_NAME}-0-0", self.name),
            WorkloadKind::Job => format!("{}-0", self.name),
        };
        let variable = |name: &str, value: String| json!({"name": name, "value": value});
        let uid = json!({"fieldRef": {"fieldPath": format!("metadata.labels['{}']", self.find_uid_label())}});
        let mut container = json!({
            "name": "launch",
            "image": self.args.image,
            "command": command,
            // The number of the node is JOB_COMPLETION_INDEX.
            "env": [
                variable(jobspec::env::LAUNCH_NODES, count),
                variable(jobspec::env::LAUNCH_RENDEZVOUS, format!("{first}.{}:{RENDEZVOUS_PORT}", self.name)),
                variable(jobspec::env::LAUNCH_KEY_FILE, format!("{KEY_DIRECTORY}/key")),
                // A later pod of node 0 continues from the checkpoints of the earlier ones.
                json!({"name": jobspec::env::LAUNCH_BATCH_JOB, "valueFrom": uid}),
            ],
            "ports": [{"name": "rendezvous", "containerPort": RENDEZVOUS_PORT}],
            "resources": self.build_resource_limits()?,
            "volumeMounts": mounts,
        });
        if let Some(workdir) = &self.args.workdir {
            container["workingDir"] = json!(workdir);
        }
        if !self.args.rdma.is_empty() {
            // RDMA registers memory, which must stay locked.
            container["securityContext"] = json!({"capabilities": {"add": ["IPC_LOCK"]}});
        }
        Ok(container)
    }

    /// Returns the name of the pod label whose value is the UID of the JobSet or Job that created
    /// the pod. The controller of a JobSet creates its Jobs again after a failure, so the UID of a
    /// Job would not identify the JobSet.
    fn find_uid_label(&self) -> &'static str {
        match self.args.kind {
            WorkloadKind::JobSet => "jobset.sigs.k8s.io/jobset-uid",
            WorkloadKind::Job => "batch.kubernetes.io/controller-uid",
        }
    }

    /// Builds the resource limits of a pod's container: GPUs, RDMA devices, CPUs and memory.
    fn build_resource_limits(&self) -> diagnostic::Result<Value> {
        let (mut limits, mut requests) = (Map::new(), Map::new());
        if self.args.gpus > 0 {
            limits.insert(self.args.gpu_resource.clone(), json!(self.args.gpus));
        }
        for text in &self.args.rdma {
            let (name, count) = text.split_once('=').unwrap_or((text, "1"));
            let count: u32 = count.parse().map_err(|_| invalid_option_error("--rdma", text, "NAME=N"))?;
            limits.insert(name.to_owned(), json!(count));
        }
        requests.extend(self.args.cpus.iter().map(|cpus| ("cpu".to_owned(), json!(cpus))));
        requests.extend(self.args.memory.iter().map(|memory| ("memory".to_owned(), json!(memory))));
        limits.extend(self.args.memory.iter().map(|memory| ("memory".to_owned(), json!(memory))));
        Ok(json!({"limits": limits, "requests": requests}))
    }

    /// Parses the values of `--volume` into pairs of a persistent volume claim and a mount path.
    fn parse_volumes(&self) -> diagnostic::Result<Vec<(&str, &str)>> {
        let parse = |text: &'_ String| {
            let split =
                text.split_once(':').filter(|(claim, path)| !claim.is_empty() && path.starts_with('/'));
            split.map(|_| ()).ok_or_else(|| invalid_option_error("--volume", text, "CLAIM:/PATH"))
        };
        self.args.volume.iter().try_for_each(parse)?;
        Ok(self.args.volume.iter().filter_map(|text| text.split_once(':')).collect())
    }

    /// Returns how long a pod may take to save and stop after SIGTERM, in seconds.
    fn compute_grace_seconds(&self) -> u64 {
        match self.job.run.command {
            Some(_) => {
                let run = &self.job.run;
                run.sigterm_delay_ms().saturating_add(run.grace_period_ms).div_ceil(1000) + SHUTDOWN_SECONDS
            }
            None => BUILTIN_SAVE_SECONDS,
        }
    }
}

/// Creates the error that the value `value` of the command-line option `option` is malformed.
/// `expected` describes the values that the option accepts.
fn invalid_option_error(option: &str, value: &str, expected: &str) -> Diagnostic {
    let message = format!("`{}` is not a value of `{option}`; expected {expected}", value.escape_debug());
    Diagnostic::error(command::USAGE, message).with_subject(option)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_names_are_dns_labels() {
        for (name, expected) in [
            ("demo", "demo"),
            ("My_Job.v2", "my-job-v2"),
            ("3d", "job-3d"),
            ("--", "job"),
            (&"x".repeat(60), &"x".repeat(40)),
        ] {
            assert_eq!(make_object_name(name), expected);
        }
    }
}
