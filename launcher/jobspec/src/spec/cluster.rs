//! `cluster`: the hosts and devices of a job.
use super::{
    host_values::{HostSelection, host_filters_type, host_selection_type},
    join::JoinSpec,
    ports::{PortSelection, ports_type},
    ssh::SshSpec,
};
use crate::accelerators::AcceleratorKind;
use crate::keys::{
    choice::{choice_type, choices, keywords_type},
    collections::{described_list_type, list_type},
    key::Key,
    key_info::{Condition, Rule},
    numbers::integer_type,
    section::{inner_section, section},
    text::{formatted_text_type, path_type},
    value_type::{ReadResult, ValueType, in_variant, out_of_range_error},
};
use crate::yaml::{
    tree::{YamlNode, YamlValue},
    value_error::ValueError,
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::{net::IpAddr, path::PathBuf};

section! {
    /// The hosts and devices of a job.
    pub struct ClusterSpec at "cluster";
    /// The hosts of the job.
    ///
    /// The job may use these hosts before `include` and `exclude` are applied.
    pub hosts: HostSelection = Key::new(host_selection_type(), "auto");
    /// DeepSpeed's filter: only these hosts and slots.
    ///
    /// The filters are stored as written in the job, and cannot be combined with `exclude`.
    pub include: Vec<String> = Key::new(host_filters_type(), "[]");
    /// DeepSpeed's filter: all but these hosts and slots.
    ///
    /// The filters are stored as written in the job, and cannot be combined with `include`.
    pub exclude: Vec<String> = Key::new(host_filters_type(), "[]");
    /// The settings of the SSH connections to the hosts.
    pub ssh: SshSpec = inner_section();
    /// How the hosts of a job with `hosts: join` find each other.
    #[serde(default)]
    pub join: JoinSpec = inner_section().printed_if(JoinSpec::differs_from_default);
    /// The number of hosts that run workers; the others are spare hosts.
    ///
    /// `None` stands for all hosts. The first available hosts are used.
    pub use_hosts: Option<u32> = Key::new(
        integer_type(1..=MAX_HOST_COUNT).documented_as("integer of 1 or more").or_none("all"),
        "all",
    );
    /// The number of workers (ranks) on each host.
    pub workers_per_host: WorkersPerHost =
        Key::new(workers_per_host_type(), "auto").with_aliases(&["nproc_per_node"]);
    /// The devices of the workers.
    pub devices: DeviceSelection = Key::new(devices_type(), "auto").with_rules(DEVICE_RULES);
    /// The number of built-in workers that share a GPU.
    pub workers_per_gpu: u32 = Key::new(integer_type(1..=64), "1").with_rules(WORKERS_PER_GPU_RULES);
    /// The backend that transfers data between built-in workers on GPUs.
    #[serde(rename = "collectives")]
    pub comm_backend: CommBackend =
        Key::new(choice_type(), "auto").with_deprecated_name("collectives").with_rules(COMM_BACKEND_RULES);
    /// The directories in which launch searches first for the CUDA libraries.
    #[serde(rename = "cuda_libs")]
    pub cuda_library_paths: Vec<PathBuf> =
        Key::new(list_type("list of paths", path_type()), "[]").with_deprecated_name("cuda_libs").with_rules(LIBRARY_RULES);
    /// The value of `MASTER_PORT` of the workers.
    pub master_port: MasterPort = Key::new(
        in_variant!(integer_type(1..=65535), MasterPort::Fixed).or_keywords(&[("auto", MasterPort::Auto)]),
        "auto",
    );
    /// The process that serves the rendezvous store of a program.
    pub store: StoreHost = Key::new(choice_type(), "agent").with_rules(STORE_RULES);
    /// The network through which the workers of different hosts reach each other.
    pub interface: InterfaceSelector = Key::new(
        in_variant!(interface_name_type(), InterfaceSelector::Named)
            .or_keywords(&[("auto", InterfaceSelector::Auto)])
            .documented_as("`auto`, name of an interface or network such as `10.1.0.0/16`"),
        "auto",
    );
    /// The TCP ports on which launch and the built-in workers listen for other hosts.
    #[serde(default)]
    pub ports: PortSelection = Key::new(ports_type(), "any");
}

/// The largest value of `cluster.use_hosts` and `run.min_hosts`, which are numbers of hosts.
pub(crate) const MAX_HOST_COUNT: u64 = 65_536;
/// The largest number of GPUs on a host that `cluster.devices` can select. GPU numbers are below
/// this value.
const MAX_GPUS_PER_HOST: u64 = 1024;

/// The condition that `cluster.devices` is `auto` or `cpu`, with which workers of the built-in
/// training compute on CPUs.
pub(crate) const TRAINS_ON_CPUS: Condition = Condition::OneOf("cluster.devices", &["auto", "cpu"]);
/// The condition that the job sets `run.command`, and therefore runs the user's own program instead
/// of the built-in training.
pub(crate) const RUNS_PROGRAM: Condition = Condition::Given("run.command");

/// Creates a rule that rejects, under the conditions `when`, a key that has an effect only in
/// built-in training on GPUs. `when` are the conditions under which a job is no such training.
const fn only_on_gpus_rule(when: &'static [Condition]) -> Rule {
    Rule::no_effect(when)
        .with_message("`{key}` has no effect except in built-in training on GPUs")
        .with_help("set `cluster.devices: cuda`, or remove the key")
}

/// The rule that warns about `cluster.store` (which process serves torch's `TCPStore`) in the
/// built-in training, which does not use torch.
const STORE_RULES: &[Rule] = &[Rule::no_effect(&[Condition::NotGiven("run.command")]).into_warning()];

/// The rule that rejects a built-in training whose `cluster.devices` selects accelerators other
/// than GPUs of NVIDIA.
const DEVICE_RULES: &[Rule] = &[Rule::no_effect(&[
    Condition::NotGiven("run.command"),
    Condition::OneOf("cluster.devices", &["rocm", "xpu", "npu", "hpu", "neuron"]),
])
.with_message("the built-in training computes on CPUs or GPUs of NVIDIA only")
.with_help("set `cluster.devices` to `cpu` or `cuda`")];
/// The rules that reject `cluster.workers_per_gpu` in all jobs except built-in training on GPUs.
const WORKERS_PER_GPU_RULES: &[Rule] =
    &[only_on_gpus_rule(&[RUNS_PROGRAM]), only_on_gpus_rule(&[TRAINS_ON_CPUS])];
/// The rules that reject `cluster.comm_backend` in jobs with `run.command`, and reject `nccl` or
/// warn about other values in training on CPUs. On CPUs, workers communicate through the host, so
/// only `nccl` is an error.
const COMM_BACKEND_RULES: &[Rule] = &[
    only_on_gpus_rule(&[RUNS_PROGRAM]),
    only_on_gpus_rule(&[TRAINS_ON_CPUS, Condition::OneOf("cluster.comm_backend", &["nccl"])]),
    only_on_gpus_rule(&[TRAINS_ON_CPUS]).into_warning(),
];
/// The rules that reject `cluster.cuda_library_paths` in jobs with `run.command`, and warn about
/// this key in training on CPUs.
const LIBRARY_RULES: &[Rule] =
    &[only_on_gpus_rule(&[RUNS_PROGRAM]), only_on_gpus_rule(&[TRAINS_ON_CPUS]).into_warning()];

/// `cluster.interface`: the network interface on which a built-in worker listens for workers on
/// other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InterfaceSelector {
    /// The address at which the host is reached by SSH. Without such an address, the first address
    /// that is not loopback.
    Auto,
    /// The interface with this name (`eth0`), or the interface with an address in this network
    /// (`10.1.0.0/16`).
    Named(String),
}

impl ClusterSpec {
    /// Returns whether the workers of the built-in training compute on GPUs. They do so if
    /// `devices` is `cuda` or a list.
    pub fn trains_on_gpus(&self) -> bool {
        matches!(self.devices, DeviceSelection::Cuda | DeviceSelection::List(_))
    }
}
impl InterfaceSelector {
    /// Returns whether `cluster.interface` permits workers to listen at the IP address `address`,
    /// which belongs to the network interface `interface`. [`InterfaceSelector::Auto`] allows every
    /// address.
    pub fn allows_address(&self, interface: &str, address: IpAddr) -> bool {
        match self {
            InterfaceSelector::Auto => true,
            InterfaceSelector::Named(wanted) => match wanted.split_once('/') {
                Some(network) => is_in_network(address, network),
                None => interface == wanted,
            },
        }
    }

    /// Returns whether `text` is a possible name of a network interface, such as `eth0`, or an IP
    /// network, such as `10.1.0.0/16`.
    pub fn is_valid_name(text: &str) -> bool {
        match text.split_once('/') {
            Some((address, bits)) => {
                let most = address.parse().map(|a: IpAddr| if a.is_ipv4() { 32 } else { 128 });
                most.is_ok_and(|most: u8| bits.parse::<u8>().is_ok_and(|bits| bits <= most))
            }
            // The kernel allows at most 15 bytes without spaces and colons.
            None => {
                (1..=15).contains(&text.len())
                    && !text.chars().any(|c| c.is_whitespace() || c.is_control() || c == ':')
            }
        }
    }
}

/// Returns whether an IP address belongs to a network such as `10.1.0.0/16`.
fn is_in_network(address: IpAddr, (network, bits): (&str, &str)) -> bool {
    let (Ok(network), Ok(bits)) = (network.parse::<IpAddr>(), bits.parse::<u32>()) else { return false };
    match (address, network) {
        (IpAddr::V4(a), IpAddr::V4(n)) if bits <= 32 => {
            let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
            u32::from(a) & mask == u32::from(n) & mask
        }
        (IpAddr::V6(a), IpAddr::V6(n)) if bits <= 128 => {
            let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
            u128::from(a) & mask == u128::from(n) & mask
        }
        _ => false,
    }
}

/// `cluster.workers_per_host`: the number of workers on each host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkersPerHost {
    /// One worker per GPU that the job uses (`workers_per_gpu` per GPU in built-in training), or
    /// one worker on CPUs.
    Auto,
    /// This number of workers on each host.
    Exactly(u32),
}

/// `cluster.devices`: the devices on which the workers compute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceSelection {
    /// For programs: the GPUs of the host, if there are any. For built-in training: the CPU.
    Auto,
    /// The CPU. Workers cannot see the host's GPUs.
    Cpu,
    /// All GPUs of NVIDIA or AMD of the host. A host without such a GPU is an error.
    Cuda,
    /// All accelerators of this kind of the host, for programs. A host without one is an error.
    Kind(AcceleratorKind),
    /// The GPUs with these numbers. The list is not empty and has no duplicates.
    List(Vec<u32>),
}

choices! {
    /// `cluster.comm_backend`: the backend that transfers GPU buffers between built-in workers.
    pub enum CommBackend {
        /// `nccl` if there are several workers and each has its own GPU, otherwise `host`.
        Auto = "auto",
        /// NVIDIA's library NCCL.
        Nccl = "nccl",
        /// Host memory between workers on one host, and TCP between hosts.
        Host = "host",
    }
}

/// `cluster.master_port`: the choice of the rendezvous port (`MASTER_PORT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MasterPort {
    /// Any port that is free on the host of rank 0.
    Auto,
    /// The port with this number.
    Fixed(u16),
}

choices! {
    /// `cluster.store`: the process that serves the rendezvous store (torch's `TCPStore`) of a
    /// program's ranks.
    pub enum StoreHost {
        /// The agent of the first host, which binds the port before any rank starts.
        Agent = "agent",
        /// Rank 0 of the program, which binds a port that was free when the run started.
        Rank0 = "rank0",
    }
}

/// Returns the parser and printer ([`ValueType`]) for `cluster.workers_per_host`: `auto` or a
/// number of workers.
fn workers_per_host_type() -> ValueType<WorkersPerHost> {
    in_variant!(integer_type(1..=1024), WorkersPerHost::Exactly)
        .or_keywords(&[("auto", WorkersPerHost::Auto)])
}

/// Returns the parser and printer ([`ValueType`]) for those values of `cluster.interface` that are
/// no keywords: names of interfaces, and networks such as `10.1.0.0/16`.
fn interface_name_type() -> ValueType<String> {
    let expected = "the name of an interface or a network such as `10.1.0.0/16`";
    formatted_text_type(
        "name",
        expected,
        "^([^\\s:/]{1,15}|[0-9a-fA-F.:]+/[0-9]+)$",
        InterfaceSelector::is_valid_name,
    )
}

/// Returns the parser and printer ([`ValueType`]) for `cluster.devices`: `auto`, `cpu`, a kind of
/// accelerators such as `cuda`, or a list of different GPU numbers.
fn devices_type() -> ValueType<DeviceSelection> {
    let schema = json!({"anyOf": [
        device_keywords_type().schema,
        {"type": "array", "items": integer_type::<u32>(0..=MAX_GPUS_PER_HOST - 1).schema, "minItems": 1, "uniqueItems": true},
    ]});
    ValueType::new(
        "`auto`, `cpu`, `cuda`, `rocm`, `xpu`, `npu`, `hpu`, `neuron` or list of integers",
        schema,
        read_devices,
        |devices| match devices {
            DeviceSelection::List(numbers) => gpu_numbers_type().print(numbers),
            keyword => device_keywords_type().print(keyword),
        },
    )
}

/// Returns the parser and printer ([`ValueType`]) for those values of `cluster.devices` that are
/// keywords, such as `cpu`.
fn device_keywords_type() -> ValueType<DeviceSelection> {
    use AcceleratorKind::{Hpu, Neuron, Npu, Rocm, Xpu};
    let kind = |kind: AcceleratorKind| (kind.traits().name, DeviceSelection::Kind(kind));
    keywords_type(vec![
        ("auto", DeviceSelection::Auto),
        ("cpu", DeviceSelection::Cpu),
        ("cuda", DeviceSelection::Cuda),
        kind(Rocm),
        kind(Xpu),
        kind(Npu),
        kind(Hpu),
        kind(Neuron),
    ])
}

/// Returns the parser and printer ([`ValueType`]) for lists of GPU numbers in `cluster.devices`.
fn gpu_numbers_type() -> ValueType<Vec<u32>> {
    described_list_type("list of integers", "a list of GPU numbers", integer_type(0..=MAX_GPUS_PER_HOST - 1))
}

/// Reads a value of `cluster.devices` from YAML.
fn read_devices(node: &YamlNode) -> ReadResult<DeviceSelection> {
    if !matches!(node.value, YamlValue::List(_)) {
        return device_keywords_type().read(node);
    }
    let numbers = gpu_numbers_type().read(node)?;
    match numbers.iter().enumerate().find(|(i, n)| numbers[..*i].contains(n)) {
        _ if numbers.is_empty() => Err(out_of_range_error("a list of at least one GPU number", node)),
        Some((_, n)) => {
            Err(ValueError::new(codes::JOB_ITEM_DUPLICATE, node.span, format!("names GPU {n} twice")))
        }
        None => Ok(DeviceSelection::List(numbers)),
    }
}
