//! Tests of the discovery of accelerators with files in place of /proc, /sys and /dev.
use super::*;
use std::{
    fs,
    os::unix::{ffi::OsStrExt, fs::symlink},
};

/// A temporary directory that stands for the root directory of a machine.
struct FakeRoot(tempfile::TempDir);

impl FakeRoot {
    /// Writes files, given by path and content.
    fn with_files<P: AsRef<str>, T: AsRef<[u8]>>(files: &[(P, T)]) -> FakeRoot {
        let root = FakeRoot(tempfile::tempdir().expect("directory"));
        files.iter().for_each(|(path, text)| root.write(path.as_ref(), text.as_ref()));
        root
    }

    fn write(&self, path: &str, text: &[u8]) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
        fs::write(path, text).expect("file");
    }

    /// Creates the device nodes `names` below /dev, as empty files.
    fn add_nodes(&self, names: &[&str]) {
        names.iter().for_each(|name| self.write(&format!("dev/{name}"), b""));
    }

    /// Creates the PCI device `bus` on a NUMA node, and links the entry `class/name` in /sys/class
    /// to it, as drivers do. `files` are attributes of the device.
    fn add_pci_device(&self, entry: &str, bus: &str, numa_node: i32, files: &[(&str, &str)]) {
        let device = format!("sys/bus/pci/devices/{bus}");
        self.write(&format!("{device}/numa_node"), format!("{numa_node}\n").as_bytes());
        files.iter().for_each(|(name, text)| self.write(&format!("{device}/{name}"), text.as_bytes()));
        let class = self.0.path().join("sys/class").join(entry);
        fs::create_dir_all(&class).expect("directory");
        symlink(self.0.path().join(device), class.join("device")).expect("a link");
    }

    /// Discovers the accelerators. The device nodes `denied` cannot be opened.
    fn discover_without(&self, denied: &[&str]) -> DiscoveredAccelerators {
        self.discover_with(denied, &[], "")
    }

    fn discover(&self) -> DiscoveredAccelerators {
        self.discover_without(&[])
    }

    /// Discovers the accelerators with the environment variables `variables`, and with `listing` as
    /// the output of `nvidia-smi -L`.
    fn discover_with(
        &self,
        denied: &[&str],
        variables: &[(&str, &str)],
        listing: &str,
    ) -> DiscoveredAccelerators {
        let is_permitted = |node: &Path| !denied.iter().any(|name| node.ends_with(name));
        let variable =
            |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        discover_in_device_files(&DeviceFiles::new(self.0.path(), &is_permitted), &variable, &|| {
            MigUuids::parse(listing)
        })
    }
}

/// Returns the kind of the accelerators, their NUMA nodes and the number of denied accelerators.
/// Panics if the accelerators are of several kinds.
fn summarize(found: &DiscoveredAccelerators) -> (Option<AcceleratorKind>, Vec<Option<u32>>, u32) {
    let kind = found.accelerators.first().map(|a| a.kind);
    assert!(found.accelerators.iter().all(|a| Some(a.kind) == kind), "{found:?}");
    (kind, found.accelerators.iter().map(|a| a.numa_node).collect(), found.denied)
}

/// Returns a machine with a GPU of NVIDIA for each address, NUMA node and device number.
fn write_nvidia(gpus: &[(&str, i32, u32)]) -> FakeRoot {
    let root = FakeRoot::with_files::<&str, &str>(&[]);
    for (bus, numa_node, minor) in gpus {
        let text = format!("Model: \t\t H100\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n");
        root.write(&format!("proc/driver/nvidia/gpus/{bus}/information"), text.as_bytes());
        let numa = format!("sys/bus/pci/devices/{}/numa_node", bus.to_lowercase());
        root.write(&numa, numa_node.to_string().as_bytes());
    }
    root
}

#[test]
fn nvidia_gpus_are_in_the_order_of_the_bus() {
    let root = write_nvidia(&[("0000:C1:00.0", 1, 11), ("0000:17:00.0", 0, 10), ("0000:65:00.0", -1, 12)]);
    let found = root.discover();
    assert_eq!(summarize(&found), (Some(AcceleratorKind::Cuda), vec![Some(0), None, Some(1)], 0));
    assert_eq!(found.accelerators[0].uuid.as_deref(), Some("GPU-10"));
    assert_eq!(found.accelerators[0].bus.as_deref(), Some("0000:17:00.0"));
    // A container with one of the GPUs that sees the list of the host.
    root.add_nodes(&["nvidia10"]);
    let given = root.discover();
    assert_eq!((summarize(&given).1, given.denied), (vec![Some(0)], 0));
}

/// Four GPUs, two on each NUMA node. The device numbers are not in the order of the bus.
#[test]
fn gpus_that_the_cgroup_denies_are_not_counted() {
    let root = write_nvidia(&[
        ("0000:17:00.0", 0, 2),
        ("0000:65:00.0", 0, 3),
        ("0000:a1:00.0", 1, 0),
        ("0000:c1:00.0", 1, 1),
    ]);
    root.add_nodes(&["nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"]);
    let nodes_without = |denied: &[&str]| {
        let (_, nodes, denied) = summarize(&root.discover_without(denied));
        (nodes, denied)
    };
    assert_eq!(nodes_without(&["nvidia2", "nvidia3"]), (vec![Some(1); 2], 2));
    assert_eq!(nodes_without(&["nvidia0", "nvidia3"]), (vec![Some(0), Some(1)], 2));
    assert_eq!(nodes_without(&["nvidia0", "nvidia1", "nvidia2", "nvidia3"]), (vec![], 4));
    fs::remove_dir_all(root.0.path().join("proc")).expect("a list to remove");
    assert_eq!(nodes_without(&["nvidia0"]), (vec![None; 3], 1));
}

/// Checks that a partitioned GPU counts as its instances, with the UUIDs of the tool, and that
/// control groups deny instances.
#[test]
fn mig_instances_are_found_with_their_uuids() {
    let root = write_nvidia(&[("0000:17:00.0", 0, 0), ("0000:65:00.0", 1, 1)]);
    root.add_nodes(&["nvidia0", "nvidia1"]);
    for (index, path) in ["gi1", "gi1/ci0", "gi2", "gi2/ci0", "gi2/ci1"].iter().enumerate() {
        let access = format!("proc/driver/nvidia/capabilities/gpu0/mig/{path}/access");
        root.write(&access, format!("DeviceFileMinor: {}\nDeviceFileMode: 292\n", 10 + index).as_bytes());
        root.add_nodes(&[&format!("nvidia-caps/nvidia-cap{}", 10 + index)]);
    }
    root.write("proc/driver/nvidia/capabilities/gpu0/mig/config", b"");
    let listing = "GPU 0: A100 (UUID: GPU-0)\n  MIG 1g (UUID: MIG-a)\n  MIG 1c (UUID: MIG-b)\n  \
                   MIG 1c (UUID: MIG-c)\nGPU 1: A100 (UUID: GPU-1)\n";
    let uuids = |found: &DiscoveredAccelerators| {
        let uuid = |a: &Accelerator| a.uuid.clone().unwrap_or_default();
        found.accelerators.iter().map(uuid).collect::<Vec<_>>().join(" ")
    };
    let found = root.discover_with(&[], &[], listing);
    // CUDA does not show the whole GPU 1 to a process that sees an instance.
    assert_eq!(summarize(&found), (Some(AcceleratorKind::Mig), vec![Some(0); 3], 0));
    assert_eq!(uuids(&found), "MIG-a MIG-b MIG-c");
    let without_tool = root.discover();
    assert_eq!((summarize(&without_tool).1.len(), uuids(&without_tool).trim()), (3, ""));
    let one = root.discover_with(&["nvidia-cap12"], &[], "GPU 0: x (UUID: GPU-0)\n  MIG (UUID: MIG-z)\n");
    assert_eq!((uuids(&one), one.denied), ("MIG-z".to_owned(), 2), "an instance needs both nodes");
    let other = root.discover_with(&["nvidia-cap12"], &[], listing);
    assert_eq!(uuids(&other), "", "3 UUIDs do not belong to 1 instance");
    // The other jobs' instances are denied with their GPU.
    assert_eq!(summarize(&root.discover_with(&["nvidia0"], &[], listing)).0, Some(AcceleratorKind::Cuda));
}

#[test]
fn amd_gpus_need_their_render_nodes() {
    let nodes = "sys/class/kfd/kfd/topology/nodes";
    let gpu = "simd_count 440\nlocation_id 5888\ndomain 0\nunique_id 3735928559\ndrm_render_minor 128\n";
    let root = FakeRoot::with_files(&[
        (format!("{nodes}/0/properties"), "cpu_cores_count 8\nsimd_count 0\n".to_owned()),
        (format!("{nodes}/1/properties"), gpu.to_owned()),
        (format!("{nodes}/2/properties"), gpu.replace("128", "129").replace("5888", "25856")),
        ("sys/bus/pci/devices/0000:17:00.0/numa_node".to_owned(), "1\n".to_owned()),
    ]);
    assert_eq!(summarize(&root.discover()), (Some(AcceleratorKind::Rocm), vec![Some(1), None], 0));
    root.add_nodes(&["kfd", "dri/renderD128", "dri/renderD129"]);
    let found = root.discover_without(&["renderD129"]);
    let expected = Accelerator {
        bus: Some("0000:17:00.0".to_owned()),
        uuid: Some("GPU-00000000deadbeef".to_owned()),
        numa_node: Some(1),
        ..Accelerator::new(AcceleratorKind::Rocm)
    };
    assert_eq!((found.accelerators, found.denied), (vec![expected], 1));
    assert_eq!(summarize(&root.discover_without(&["dev/kfd"])), (None, vec![], 2));
}

/// Checks that tiles are counted unless Level Zero numbers GPUs, and that integrated graphics and
/// network adapters of Intel are no accelerators.
#[test]
fn intel_gpus_count_as_their_tiles() {
    let root = FakeRoot::with_files::<&str, &str>(&[]);
    let display = [("vendor", "0x8086\n"), ("class", "0x038000\n"), ("tile0/id", ""), ("tile1/id", "")];
    root.add_pci_device("drm/renderD128", "0000:9a:00.0", 1, &display);
    let older = [("vendor", "0x8086"), ("drm/n/gt/gt0/id", "0")];
    root.add_pci_device("drm/renderD129", "0000:1a:00.0", 0, &older);
    let integrated = [("vendor", "0x8086"), ("class", "0x030000")];
    root.add_pci_device("drm/renderD130", "0000:00:02.0", 0, &integrated);
    root.add_pci_device("drm/renderD131", "0000:03:00.0", 0, &[("vendor", "0x1a03"), ("class", "0x030000")]);
    root.add_pci_device("drm/renderD132", "0000:04:00.0", 0, &[("vendor", "0x8086"), ("class", "0x020000")]);
    root.write("sys/class/drm/version", b"drm 1.1.0");
    let nodes =
        |denied: &[&str], variables: &[(&str, &str)]| summarize(&root.discover_with(denied, variables, ""));
    let xpu = Some(AcceleratorKind::Xpu);
    assert_eq!(nodes(&[], &[]), (xpu, vec![Some(0), Some(1), Some(1)], 0));
    assert_eq!(nodes(&[], &[("ZE_FLAT_DEVICE_HIERARCHY", "COMPOSITE")]), (xpu, vec![Some(0), Some(1)], 0));
    assert_eq!(nodes(&["renderD129"], &[]), (xpu, vec![Some(1); 2], 1));
}

#[test]
fn npus_are_counted_by_their_nodes() {
    let root = FakeRoot::with_files::<&str, &str>(&[]);
    root.add_nodes(&["davinci0", "davinci1", "davinci10", "davinci_manager", "davinci", "davinci1a"]);
    assert_eq!(summarize(&root.discover()), (Some(AcceleratorKind::Npu), vec![None; 3], 0));
    assert_eq!(summarize(&root.discover_without(&["davinci0", "davinci10"])).2, 2);
}

/// Checks that Gaudi accelerators are named by module id, and that accelerators of other vendors
/// with the same names are left out.
#[test]
fn gaudi_accelerators_are_in_the_order_of_their_modules() {
    let root = FakeRoot::with_files::<&str, &str>(&[]);
    let gaudi = |module: &'static str| [("vendor", "0x1da3\n"), ("module_id", module)];
    root.add_pci_device("accel/accel0", "0000:19:00.0", 0, &gaudi("5\n"));
    root.add_pci_device("accel/accel1", "0000:b3:00.0", 1, &gaudi("4"));
    root.add_pci_device("accel/accel2", "0000:00:0b.0", 0, &[("vendor", "0x8086")]);
    root.add_nodes(&["accel/accel0", "accel/accel1", "accel/accel2", "accel/accel_controlD0"]);
    let found = root.discover();
    assert_eq!(summarize(&found), (Some(AcceleratorKind::Hpu), vec![Some(1), Some(0)], 0));
    let numbers: Vec<_> = found.accelerators.iter().map(|a| a.number).collect();
    assert_eq!((numbers, found.has_other_devices), (vec![Some(4), Some(5)], false));
    assert_eq!(
        summarize(&root.discover_without(&["accel1"])),
        (Some(AcceleratorKind::Hpu), vec![Some(0)], 1)
    );
    let older = FakeRoot::with_files::<&str, &str>(&[]);
    older.add_nodes(&["hl0", "hl1", "hl_controlD0"]);
    assert_eq!(older.discover().accelerators, vec![Accelerator::new(AcceleratorKind::Hpu); 2]);
}

#[test]
fn neuron_cores_of_all_devices_are_counted() {
    let root = FakeRoot::with_files::<&str, &str>(&[]);
    root.add_nodes(&["neuron0", "neuron1"]);
    let count = |variables: &[(&str, &str)], denied: &[&str]| {
        let found = root.discover_with(denied, variables, "").accelerators;
        (found.len(), found.last().and_then(|a| a.number))
    };
    assert_eq!(count(&[], &[]), (2, None), "the numbers of cores are unknown");
    let device = |n: u32| format!("sys/devices/virtual/neuron_device/neuron{n}");
    root.write(&format!("{}/core_count", device(0)), b"2\n");
    assert_eq!(count(&[], &[]), (2, None), "a part of the numbers is unknown");
    (0..2).for_each(|core| root.write(&format!("{}/neuron_core{core}/info", device(1)), b""));
    assert_eq!(count(&[], &[]), (4, Some(3)));
    assert_eq!(count(&[], &["neuron1"]), (2, Some(1)));
    for n in [0, 1] {
        root.write(&format!("{}/core_count", device(n)), b"8");
        root.write(&format!("{}/info/architecture/device_name", device(n)), b"Trainium2\n");
    }
    assert_eq!(count(&[], &[]), (8, Some(7)), "two physical cores form a logical one");
    assert_eq!(count(&[("NEURON_LOGICAL_NC_CONFIG", "1")], &[]), (16, Some(15)));
    assert_eq!(count(&[("NEURON_RT_VIRTUAL_CORE_SIZE", "0")], &[]), (16, Some(15)));
}

/// Checks that a machine can have accelerators of several kinds, and that devices of other kinds
/// are noticed.
#[test]
fn several_kinds_and_other_devices_are_found() {
    let root = FakeRoot::with_files::<&str, &str>(&[]);
    root.add_nodes(&["nvidia0", "davinci0", "null"]);
    let kinds: Vec<_> = root.discover().accelerators.iter().map(|a| a.kind).collect();
    assert_eq!(kinds, [AcceleratorKind::Cuda, AcceleratorKind::Npu]);
    assert!(!root.discover().has_other_devices);
    for other in ["dxg", "accel0", "mtgpu.1"] {
        let root = FakeRoot::with_files::<&str, &str>(&[]);
        root.add_nodes(&[other]);
        let expected =
            DiscoveredAccelerators { has_other_devices: true, ..DiscoveredAccelerators::default() };
        assert_eq!(root.discover(), expected, "{other}");
    }
}

/// Checks that damaged and malicious trees neither block nor need much memory: a named pipe, links
/// in a cycle, directories in place of files, binary data, and numbers out of range.
#[test]
fn damaged_trees_are_read_with_limits() {
    let root = FakeRoot::with_files(&[
        ("sys/class/kfd/kfd/topology/nodes/1/properties", &b"simd_count 99999999999999999999\n"[..]),
        (
            "sys/class/kfd/kfd/topology/nodes/2/properties",
            b"simd_count 4\nlocation_id 18446744073709551615\n",
        ),
        ("sys/class/kfd/kfd/topology/nodes/x/properties", b"simd_count 4\n"),
        ("proc/driver/nvidia/gpus/..%2f..%2fetc/information", b"GPU UUID: \xff\xfe\nDevice Minor: -1\n"),
        ("sys/devices/virtual/neuron_device/neuron0/core_count", b"4000000000"),
        ("sys/class/drm/renderD128/device/vendor/file", b""),
        ("dev/nvidia99999999999", b""),
        ("dev/nvidia+1", b""),
    ]);
    root.add_nodes(&["neuron0", "davinci4294967295", "accel/accel0"]);
    let path = |name: &str| root.0.path().join(name);
    fs::create_dir_all(path("sys/class/drm/renderD129")).expect("directory");
    symlink("device", path("sys/class/drm/renderD129/device")).expect("a link to itself");
    fs::create_dir_all(path("sys/class/accel/accel0/device")).expect("directory");
    let pipe = path("sys/class/accel/accel0/device/vendor");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a named pipe");
    fs::write(path("dev").join(std::ffi::OsStr::from_bytes(b"nvidia\xff")), "").expect("file");
    let found = root.discover();
    let kinds: Vec<_> = found.accelerators.iter().map(|a| a.kind.traits().name).collect();
    assert_eq!(kinds, ["cuda", "rocm", "npu", "neuron"]);
    let large = FakeRoot::with_files(&[(
        "sys/class/kfd/kfd/topology/nodes/1/properties",
        [b"x".repeat(1 << 20), b"\nsimd_count 4\n".to_vec()].concat(),
    )]);
    assert_eq!(large.discover().accelerators, [], "only the beginning of the file is read");
    let many: Vec<(String, &str)> = (0..1500).map(|n| (format!("dev/davinci{n}"), "")).collect();
    assert_eq!(FakeRoot::with_files(&many).discover().accelerators.len(), MAX_ACCELERATORS);
}

#[test]
fn simulated_accelerators_are_parsed() {
    let count = |text| parse_simulated_accelerators(Some(text)).map(|found| (found.len(), found[0].kind));
    assert_eq!(count("8"), Some((8, AcceleratorKind::Cuda)));
    assert_eq!(count("npu:4"), Some((4, AcceleratorKind::Npu)));
    assert_eq!(count("cuda:99999"), Some((MAX_ACCELERATORS, AcceleratorKind::Cuda)));
    assert_eq!((count("tpu:1"), count("x"), count("npu:-1")), (None, None, None));
    assert_eq!(count("xpu:1,npu:2"), Some((3, AcceleratorKind::Xpu)));
    assert_eq!(parse_simulated_accelerators(Some("0")), Some(Vec::new()));
    assert_eq!(parse_simulated_accelerators(None), None);
}
