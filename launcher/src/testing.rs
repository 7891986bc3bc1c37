//! A sample job for unit tests.
use jobspec::{
    CheckpointSpec, ClusterSpec, CommBackend, CpuBind, DeviceSelection, HangTimeout, HostSelection, JobSpec,
    JoinSpec, LogsSpec, MasterPort, MinHosts, ResumeFrom, ResumeSpec, RngPolicy, RunSignalActions, RunSpec,
    SaveInterval, SignalAction, SshClient, SshConfig, SshSpec, StoreHost, StragglerSpec, VisibleDevices,
    WorkersPerHost,
};

/// Returns a valid job named `sample` that runs the program `true` on this machine.
pub(crate) fn sample_job() -> JobSpec {
    JobSpec {
        name: "sample".into(),
        cluster: sample_cluster(),
        run: sample_run(),
        train: None,
        checkpoint: CheckpointSpec {
            dir: "runs/{name}/checkpoints".into(),
            every: SaveInterval::Never,
            keep: 3,
            r#async: false,
            parity: false,
            require_shared: false,
            memory: None,
            gather_16bit_weights_on_model_save: false,
        },
        resume: ResumeSpec { from: ResumeFrom::Auto, rng: RngPolicy::Reconcile },
        observe: jobspec::ObserveSpec::default(),
        slurm: jobspec::SlurmSpec::default(),
    }
}

/// Returns the section `cluster` of the sample job: workers on this machine, and defaults.
fn sample_cluster() -> ClusterSpec {
    ClusterSpec {
        hosts: HostSelection::Local,
        include: Vec::new(),
        exclude: Vec::new(),
        ssh: SshSpec {
            user: None,
            port: None,
            key: None,
            config: SshConfig::Default,
            client: SshClient::Auto,
            known_hosts: None,
            jump: None,
            connect_timeout_ms: 10_000,
            fanout: 64,
        },
        join: JoinSpec::default(),
        use_hosts: None,
        workers_per_host: WorkersPerHost::Auto,
        devices: DeviceSelection::Auto,
        workers_per_gpu: 1,
        comm_backend: CommBackend::Auto,
        cuda_library_paths: Vec::new(),
        master_port: MasterPort::Auto,
        store: StoreHost::Agent,
        interface: jobspec::InterfaceSelector::Auto,
        ports: jobspec::PortSelection::Any,
    }
}

/// Returns the section `run` of the sample job: the program `true`, and defaults.
fn sample_run() -> RunSpec {
    RunSpec {
        command: Some(vec!["true".into()]),
        workdir: "/".into(),
        env: Vec::new(),
        env_from: Vec::new(),
        pass_env: Vec::new(),
        activate: Vec::new(),
        activate_timeout_ms: 60_000,
        wrap: Vec::new(),
        container: None,
        terminal: None,
        cpu_bind: CpuBind::Auto,
        visible_devices: VisibleDevices::All,
        local_rank_argument: false,
        stop_signal: jobspec::StopSignal::Term,
        stop_timeout_ms: 60_000,
        grace_period_ms: 3000,
        restarts: 0,
        min_hosts: MinHosts::All,
        host_lease_ms: 5000,
        controller_lease_ms: 60_000,
        on_controller_loss: None,
        controller_timeout_ms: 900_000,
        hang_timeout: HangTimeout::Auto,
        progress_pattern: None,
        signals: RunSignalActions {
            usr1: SignalAction::Save,
            usr2: SignalAction::Ignore,
            term: SignalAction::SaveAndStop,
        },
        straggler: StragglerSpec::default(),
        logs: LogsSpec { dir: "runs/{name}/{run}".into(), show: vec![0], prefix: true, max_size: 1 << 30 },
    }
}
