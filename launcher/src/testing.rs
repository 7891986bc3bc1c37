//! Samples for the unit tests.
use contract::job::{
    CheckpointSpec, ClusterSpec, Count, Devices, Every, Hosts, JobSpec, LogsSpec, MasterPort, ResumeFrom,
    ResumeSpec, RngPolicy, RunSpec, StoreHost,
};

/// A job that runs `true`.
pub(crate) fn job() -> JobSpec {
    JobSpec {
        name: "sample".into(),
        cluster: ClusterSpec {
            hosts: Hosts::Local,
            workers_per_host: Count::Auto,
            devices: Devices::Auto,
            master_port: MasterPort::Auto,
            store: StoreHost::Agent,
        },
        run: RunSpec {
            command: Some(vec!["true".into()]),
            workdir: "/".into(),
            env: Vec::new(),
            env_from: Vec::new(),
            grace_ms: 3000,
            logs: LogsSpec {
                dir: "runs/{name}/{run}".into(),
                show: vec![0],
                prefix: true,
                max_size: 1 << 30,
            },
        },
        train: None,
        checkpoint: CheckpointSpec {
            dir: "runs/{name}/checkpoints".into(),
            every: Every::Never,
            keep: 3,
            r#async: false,
            gather_16bit_weights_on_model_save: false,
        },
        resume: ResumeSpec { from: ResumeFrom::Auto, rng: RngPolicy::Reconcile },
    }
}
