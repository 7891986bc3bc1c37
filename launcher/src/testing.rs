//! A sample job for unit tests.
use jobspec::{
    CheckpointSpec, ClusterSpec, CommBackend, CpuBind, DeviceSelection, HostSelection, JobSpec, KnownHosts,
    LogsSpec, MasterPort, MinHosts, ResumeFrom, ResumeSpec, RngPolicy, RunSpec, SaveInterval, SignalAction,
    Signals, SshConfig, SshSpec, StoreHost, VisibleDevices, WorkersPerHost,
};

/// Returns a valid job named `sample` that runs the program `true` on this machine.
pub(crate) fn sample_job() -> JobSpec {
    JobSpec {
        name: "sample".into(),
        cluster: ClusterSpec {
            hosts: HostSelection::Local,
            include: Vec::new(),
            exclude: Vec::new(),
            ssh: SshSpec {
                user: None,
                port: None,
                key: None,
                config: SshConfig::Default,
                known_hosts: KnownHosts::Strict,
                jump: None,
                connect_timeout_ms: 10_000,
                fanout: 64,
            },
            use_hosts: None,
            workers_per_host: WorkersPerHost::Auto,
            devices: DeviceSelection::Auto,
            workers_per_gpu: 1,
            comm_backend: CommBackend::Auto,
            cuda_library_paths: Vec::new(),
            master_port: MasterPort::Auto,
            store: StoreHost::Agent,
            interface: jobspec::InterfaceSelector::Auto,
        },
        run: RunSpec {
            command: Some(vec!["true".into()]),
            workdir: "/".into(),
            env: Vec::new(),
            env_from: Vec::new(),
            pass_env: Vec::new(),
            cpu_bind: CpuBind::Auto,
            visible_devices: VisibleDevices::All,
            local_rank_argument: false,
            grace_period_ms: 3000,
            restarts: 0,
            min_hosts: MinHosts::All,
            host_lease_ms: 5000,
            controller_lease_ms: 60_000,
            on_controller_loss: None,
            controller_timeout_ms: 900_000,
            hang_timeout_ms: None,
            progress_pattern: None,
            signals: Signals {
                usr1: SignalAction::Save,
                usr2: SignalAction::Ignore,
                term: SignalAction::SaveAndStop,
            },
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
            every: SaveInterval::Never,
            keep: 3,
            r#async: false,
            parity: false,
            require_shared: false,
            gather_16bit_weights_on_model_save: false,
        },
        resume: ResumeSpec { from: ResumeFrom::Auto, rng: RngPolicy::Reconcile },
        slurm: jobspec::SlurmSpec::default(),
    }
}
