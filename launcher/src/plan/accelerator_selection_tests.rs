//! Tests of the selection of accelerators and of the variables that select them.
use super::*;
use protocol::hardware::Accelerator;

/// Returns the inventory of a host with one GPU on each of the NUMA nodes `nodes`. `inherited`
/// contains the environment variables of the host.
fn build_inventory(kind: AcceleratorKind, nodes: &[u32], inherited: &[(&str, &str)]) -> HostInventory {
    let gpu = |(i, node): (usize, &u32)| Accelerator {
        uuid: Some(format!("GPU-{i}f")),
        numa_node: Some(*node),
        ..Accelerator::new(kind)
    };
    let inherited_env = inherited.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
    HostInventory {
        host: "h".into(),
        cpus: vec![0],
        accelerators: nodes.iter().enumerate().map(gpu).collect(),
        inherited_env,
        ..HostInventory::default()
    }
}

fn job_with_devices(devices: DeviceSelection) -> JobSpec {
    let mut job = crate::testing::sample_job();
    job.cluster.devices = devices;
    job
}

/// Formats the environment variables that select the GPUs of the worker with the local rank
/// `rank`. Panics if the selection is rejected.
fn format_env(
    inventory: &HostInventory,
    devices: DeviceSelection,
    policy: VisibleDevices,
    rank: u32,
) -> String {
    let gpus = select_accelerators(&job_with_devices(devices), inventory).expect("GPUs");
    gpus.build_env(policy, rank).iter().map(|(n, v)| format!("{n}={v}")).collect::<Vec<_>>().join(" ")
}

#[test]
fn gpu_variables_follow_the_policy_and_the_inventory() {
    use VisibleDevices::{All, One};
    let cuda = |inherited: &[(&str, &str)]| build_inventory(AcceleratorKind::Cuda, &[0, 0, 1, 1], inherited);
    let (plain, some) = (cuda(&[]), cuda(&[("CUDA_VISIBLE_DEVICES", "3, GPU-1f")]));
    for (inventory, devices, policy, rank, expected) in [
        (&plain, DeviceSelection::Auto, All, 2, ""),
        (&plain, DeviceSelection::Auto, One, 2, "CUDA_VISIBLE_DEVICES=2 CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        (
            &plain,
            DeviceSelection::List(vec![2, 0]),
            All,
            1,
            "CUDA_VISIBLE_DEVICES=2,0 CUDA_DEVICE_ORDER=PCI_BUS_ID",
        ),
        (
            &plain,
            DeviceSelection::List(vec![2, 0]),
            One,
            1,
            "CUDA_VISIBLE_DEVICES=0 CUDA_DEVICE_ORDER=PCI_BUS_ID",
        ),
        (&plain, DeviceSelection::Cpu, All, 0, "CUDA_VISIBLE_DEVICES="),
        (&some, DeviceSelection::Auto, All, 1, ""),
        (&some, DeviceSelection::Cuda, One, 1, "CUDA_VISIBLE_DEVICES=GPU-1f"),
        (
            &some,
            DeviceSelection::List(vec![0]),
            All,
            0,
            "CUDA_VISIBLE_DEVICES=0 CUDA_DEVICE_ORDER=PCI_BUS_ID",
        ),
        (
            &build_inventory(
                AcceleratorKind::Rocm,
                &[0, 0, 1],
                &[("HIP_VISIBLE_DEVICES", "1,2"), ("CUDA_VISIBLE_DEVICES", "0")],
            ),
            DeviceSelection::Auto,
            One,
            1,
            "CUDA_VISIBLE_DEVICES=2 HIP_VISIBLE_DEVICES=2",
        ),
        (
            &build_inventory(AcceleratorKind::Rocm, &[0], &[]),
            DeviceSelection::Auto,
            One,
            0,
            "CUDA_VISIBLE_DEVICES=0 HIP_VISIBLE_DEVICES=0",
        ),
        (&build_inventory(AcceleratorKind::Cuda, &[], &[]), DeviceSelection::Auto, All, 0, ""),
    ] {
        assert_eq!(format_env(inventory, devices, policy, rank), expected);
    }
    let gpus = select_accelerators(&job_with_devices(DeviceSelection::Auto), &some).expect("GPUs");
    assert_eq!(
        (gpus.count(), gpus.numa_node_of_worker(0), gpus.numa_node_of_worker(1), gpus.numa_node_of_worker(2)),
        (2, Some(1), Some(0), None)
    );
}

/// Checks that the slots of a host filter are GPU numbers, as in DeepSpeed.
#[test]
fn selected_slots_are_gpus() {
    let four = build_inventory(AcceleratorKind::Cuda, &[0, 0, 1, 1], &[]);
    let chosen = build_inventory(AcceleratorKind::Cuda, &[0, 0, 1, 1], &[("CUDA_VISIBLE_DEVICES", "3,1")]);
    let none = build_inventory(AcceleratorKind::Cuda, &[], &[]);
    let unknown = HostInventory::unknown("h");
    let select = |inventory: &HostInventory, devices: DeviceSelection, slots: &[u32]| {
        let mut job = job_with_devices(devices);
        job.cluster.include = vec!["h:0".into()];
        let (slots, selected_slots) = (Some(slots.len() as u32), Some(slots.to_vec()));
        let (name, inventory) = ("h".into(), inventory.clone());
        let host = JobHost { name, slots, selected_slots, local: false, inventory: inventory.clone() };
        let gpus = select_accelerators(&job, &inventory)?.retain_selected_slots(&job, &host)?;
        let env = gpus.build_env(VisibleDevices::All, 0);
        let last = gpus.numa_node_of_worker(slots.unwrap_or(1) - 1);
        Ok::<_, Diagnostic>((env.first().map_or_else(String::new, |(_, value)| value.clone()), last))
    };
    let expected = |text: &str, node| Ok((text.to_owned(), node));
    assert_eq!(select(&four, DeviceSelection::Auto, &[2, 3]), expected("2,3", Some(1)));
    assert_eq!(select(&four, DeviceSelection::Cuda, &[0, 1]), expected("0,1", Some(0)));
    assert_eq!(select(&chosen, DeviceSelection::Auto, &[1]), expected("1", Some(0)));
    assert_eq!(select(&chosen, DeviceSelection::Auto, &[0]), expected("3", Some(1)));
    assert_eq!(select(&unknown, DeviceSelection::Auto, &[1, 3]), expected("1,3", None));
    assert_eq!(select(&none, DeviceSelection::Auto, &[0, 1]), expected("", None));
    assert_eq!(select(&four, DeviceSelection::Cpu, &[0, 1]), expected("", None));
    for (inventory, devices, slots, code) in [
        (&four, DeviceSelection::Auto, &[3, 4][..], codes::GPU_INDEX_UNKNOWN),
        (&chosen, DeviceSelection::Auto, &[2], codes::GPU_INDEX_UNKNOWN),
        (&none, DeviceSelection::Auto, &[2, 3], codes::SLOTS_NOT_GPUS),
        (&four, DeviceSelection::Cpu, &[1], codes::SLOTS_NOT_GPUS),
        (&four, DeviceSelection::List(vec![0, 1]), &[1], codes::SLOTS_NOT_GPUS),
    ] {
        let error = select(inventory, devices, slots).expect_err("rejected");
        assert_eq!((error.code(), error.subject()), (code, Some("cluster.include")), "{error}");
    }
}

/// Checks that a built-in worker sees only its own GPU, and that `workers_per_gpu` workers
/// share one.
#[test]
fn built_in_workers_have_a_gpu_each_unless_they_share() {
    let inventory = build_inventory(AcceleratorKind::Cuda, &[0, 1], &[]);
    let mut job = job_with_devices(DeviceSelection::Cuda);
    job.run.command = None;
    let seen = |job: &JobSpec, rank| {
        let gpus = select_accelerators(job, &inventory).expect("GPUs");
        let env = gpus.build_env(VisibleDevices::All, rank);
        (env[0].1.clone(), gpus.numa_node_of_worker(rank), gpus.device_label_of_worker(rank))
    };
    assert_eq!(seen(&job, 1), ("1".to_owned(), Some(1), "gpu 1".to_owned()));
    let gpus = select_accelerators(&job, &inventory).expect("GPUs");
    let too_few = gpus.check_worker_count(&job, 3, &inventory).expect_err("two GPUs");
    assert_eq!(too_few.code(), codes::GPUS_TOO_FEW);
    assert_eq!(too_few.subject(), Some("cluster.workers_per_host"));
    job.cluster.workers_per_gpu = 2;
    assert_eq!(seen(&job, 1).0, "0");
    assert_eq!(seen(&job, 3), ("1".to_owned(), Some(1), "gpu 1".to_owned()));
    let gpus = select_accelerators(&job, &inventory).expect("GPUs");
    assert_eq!(gpus.worker_capacity(), 4);
    assert!(
        gpus.check_worker_count(&job, 4, &inventory).is_ok()
            && gpus.check_worker_count(&job, 5, &inventory).is_err()
    );
    job.cluster.devices = DeviceSelection::Auto;
    assert_eq!(select_accelerators(&job, &inventory).expect("no GPU").count(), 0);
}

#[test]
fn an_empty_list_of_devices_hides_all_gpus() {
    let hidden = build_inventory(AcceleratorKind::Cuda, &[0], &[("CUDA_VISIBLE_DEVICES", "")]);
    assert_eq!(
        select_accelerators(&job_with_devices(DeviceSelection::Auto), &hidden).expect("GPUs").count(),
        0
    );
    assert!(select_accelerators(&job_with_devices(DeviceSelection::Cuda), &hidden).is_err());
}

#[test]
fn gpus_that_do_not_exist_are_rejected() {
    let inventory = build_inventory(AcceleratorKind::Cuda, &[0, 0], &[]);
    let error = select_accelerators(&job_with_devices(DeviceSelection::List(vec![0, 2])), &inventory)
        .expect_err("no GPU 2");
    assert_eq!((error.code(), error.field("gpu")), (codes::GPU_INDEX_UNKNOWN, Some(&2.into())));
    let mut one = job_with_devices(DeviceSelection::Auto);
    one.run.visible_devices = VisibleDevices::One;
    let gpus = select_accelerators(&one, &inventory).expect("GPUs");
    assert!(gpus.check_worker_count(&one, 2, &inventory).is_ok());
    let error = gpus.check_worker_count(&one, 3, &inventory).expect_err("two GPUs");
    assert_eq!((error.code(), error.subject()), (codes::GPUS_TOO_FEW, Some("run.visible_devices")));
}

/// Returns the inventory of a host with `count` accelerators of a kind on NUMA nodes 0, 1, 2 and so
/// on, and these environment variables.
fn build_host(kind: AcceleratorKind, count: u32, inherited: &[(&str, &str)]) -> HostInventory {
    build_inventory(kind, &(0..count).collect::<Vec<_>>(), inherited)
}

#[test]
fn each_kind_has_its_variable() {
    use VisibleDevices::One;
    let list = || DeviceSelection::List(vec![1, 0]);
    for (kind, expected) in [
        (AcceleratorKind::Xpu, "ZE_AFFINITY_MASK=1"),
        (AcceleratorKind::Npu, "ASCEND_RT_VISIBLE_DEVICES=1"),
        (AcceleratorKind::Hpu, "HABANA_VISIBLE_MODULES=5"),
        (AcceleratorKind::Neuron, "NEURON_RT_VISIBLE_CORES=5"),
        (AcceleratorKind::Mig, "CUDA_VISIBLE_DEVICES=GPU-1f"),
        (AcceleratorKind::Rocm, "CUDA_VISIBLE_DEVICES=1 HIP_VISIBLE_DEVICES=1"),
        (AcceleratorKind::Cuda, "CUDA_VISIBLE_DEVICES=1 CUDA_DEVICE_ORDER=PCI_BUS_ID"),
    ] {
        let mut host = build_host(kind, 2, &[]);
        if matches!(kind, AcceleratorKind::Hpu | AcceleratorKind::Neuron) {
            host.accelerators.iter_mut().zip(4..).for_each(|(a, number)| a.number = Some(number));
        }
        assert_eq!(format_env(&host, DeviceSelection::Auto, One, 1), expected);
        assert_eq!(format_env(&host, list(), One, 0), expected, "a list counts positions");
        let selection = select_accelerators(&job_with_devices(list()), &host).expect("two");
        assert_eq!((selection.count(), selection.numa_node_of_worker(0)), (2, Some(1)));
        assert_eq!(format_env(&host, DeviceSelection::Auto, VisibleDevices::All, 1), "");
    }
    let npu = select_accelerators(
        &job_with_devices(DeviceSelection::Kind(AcceleratorKind::Npu)),
        &build_host(AcceleratorKind::Npu, 2, &[]),
    )
    .expect("NPUs");
    assert_eq!(
        (npu.device_label_of_worker(1), npu.device_label_of_worker(2)),
        ("npu 1".to_owned(), "cpu".to_owned())
    );
}

/// Checks that variables of the user restrict each kind, with the numbering of its runtime.
#[test]
fn variables_of_the_host_restrict_each_kind() {
    let selected = |kind, count, inherited: &[(&str, &str)]| {
        let mut host = build_host(kind, count, inherited);
        if matches!(kind, AcceleratorKind::Hpu | AcceleratorKind::Neuron) {
            host.accelerators.iter_mut().zip(0..).for_each(|(a, number)| a.number = Some(number));
        }
        let found = select_accelerators(&job_with_devices(DeviceSelection::Auto), &host).expect("selected");
        let nodes: Vec<Option<u32>> =
            (0..found.count() as u32).map(|rank| found.numa_node_of_worker(rank)).collect();
        (found.names.join(" "), nodes)
    };
    let some = |nodes: &[u32]| nodes.iter().copied().map(Some).collect::<Vec<_>>();
    for (kind, inherited, names, nodes) in [
        (AcceleratorKind::Xpu, &[("ZE_AFFINITY_MASK", "3,1.0")][..], "3 1.0", &[3, 1][..]),
        (AcceleratorKind::Npu, &[("ASCEND_RT_VISIBLE_DEVICES", "2, 0")], "2 0", &[2, 0]),
        (AcceleratorKind::Hpu, &[("HABANA_VISIBLE_MODULES", "3,2")], "3 2", &[3, 2]),
        (AcceleratorKind::Neuron, &[("NEURON_RT_VISIBLE_CORES", "0,2-3")], "0 2 3", &[0, 2, 3]),
        // HIP counts the GPUs that ROCR shows.
        (AcceleratorKind::Rocm, &[("ROCR_VISIBLE_DEVICES", "3,GPU-1f")], "0 1", &[3, 1]),
        (
            AcceleratorKind::Rocm,
            &[("ROCR_VISIBLE_DEVICES", "3,1,2"), ("HIP_VISIBLE_DEVICES", "2,0")],
            "2 0",
            &[2, 3],
        ),
        (AcceleratorKind::Rocm, &[("CUDA_VISIBLE_DEVICES", "1"), ("HIP_VISIBLE_DEVICES", "")], "1", &[1]),
        // CUDA ignores an entry that does not exist, and all after it.
        (AcceleratorKind::Cuda, &[("CUDA_VISIBLE_DEVICES", "1,4,2")], "1", &[1]),
        (AcceleratorKind::Cuda, &[("CUDA_VISIBLE_DEVICES", "0,-1,2")], "0", &[0]),
        (AcceleratorKind::Npu, &[("ASCEND_RT_VISIBLE_DEVICES", "")], "0 1 2 3", &[0, 1, 2, 3]),
        (AcceleratorKind::Npu, &[("CUDA_VISIBLE_DEVICES", "1")], "0 1 2 3", &[0, 1, 2, 3]),
    ] {
        assert_eq!(selected(kind, 4, inherited), (names.to_owned(), some(nodes)), "{inherited:?}");
    }
    let huge = [("NEURON_RT_VISIBLE_CORES", "0-4294967295,7")];
    let host = HostInventory { accelerators: vec![], ..build_host(AcceleratorKind::Neuron, 0, &huge) };
    let job = job_with_devices(DeviceSelection::Kind(AcceleratorKind::Neuron));
    assert_eq!(select_accelerators(&job, &host).expect("listed").count(), 1024, "the list is limited");
    // A list of numbers counts the GPUs that ROCR shows.
    let rocr = build_host(AcceleratorKind::Rocm, 4, &[("ROCR_VISIBLE_DEVICES", "2,3")]);
    assert!(select_accelerators(&job_with_devices(DeviceSelection::List(vec![1])), &rocr).is_ok());
    assert!(select_accelerators(&job_with_devices(DeviceSelection::List(vec![2])), &rocr).is_err());
}

/// Checks that GPUs of AMD next to those of NVIDIA, often graphics of the CPU, change nothing
/// unless a variable of AMD selects them.
#[test]
fn gpus_of_amd_count_next_to_those_of_nvidia_only_if_they_are_listed() {
    let select = |devices, trains: bool, inherited: &[(&str, &str)]| {
        let mut host = build_host(AcceleratorKind::Cuda, 2, inherited);
        host.accelerators.push(Accelerator::new(AcceleratorKind::Rocm));
        let mut job = job_with_devices(devices);
        if trains {
            job.run.command = None;
        }
        let selection = select_accelerators(&job, &host).expect("a kind");
        (selection.kind, selection.names)
    };
    let nvidia = |names: &[&str]| (AcceleratorKind::Cuda, names.iter().map(|n| (*n).to_owned()).collect());
    assert_eq!(select(DeviceSelection::Auto, false, &[]), nvidia(&["0", "1"]));
    assert_eq!(select(DeviceSelection::Auto, false, &[("CUDA_VISIBLE_DEVICES", "1")]), nvidia(&["1"]));
    assert_eq!(select(DeviceSelection::List(vec![1]), true, &[("HIP_VISIBLE_DEVICES", "0")]), nvidia(&["1"]));
    let amd = select(DeviceSelection::Auto, false, &[("HIP_VISIBLE_DEVICES", "0")]);
    assert_eq!(amd, (AcceleratorKind::Rocm, vec!["0".to_owned()]));
}

/// Checks that the user's list is kept on a host of which one GPU is partitioned, and that a device
/// that is listed twice counts once.
#[test]
fn listed_gpus_are_kept_next_to_mig_instances_and_count_once() {
    let inherited = [("CUDA_VISIBLE_DEVICES", "0,1,2,3,2")];
    let host = build_host(AcceleratorKind::Mig, 2, &inherited);
    let job = job_with_devices(DeviceSelection::Auto);
    let selection = select_accelerators(&job, &host).expect("listed");
    assert_eq!(selection.names, ["0", "1", "2", "3"]);
    assert!(selection.check_worker_count(&job, 4, &host).is_ok());
}

/// Checks that a job must choose a kind only where the kind matters.
#[test]
fn a_mixed_host_needs_a_choice() {
    let mut mixed = build_host(AcceleratorKind::Cuda, 2, &[]);
    mixed.accelerators.push(Accelerator::new(AcceleratorKind::Xpu));
    let select = |devices| select_accelerators(&job_with_devices(devices), &mixed);
    let auto = select(DeviceSelection::Auto).expect("no choice");
    let error = auto.check_single_kind(&mixed).expect_err("several kinds");
    assert_eq!((error.code(), error.subject()), (codes::ACCELERATORS_MIXED, Some("cluster.devices")));
    let message = "h has accelerators of several kinds: 2 GPUs (NVIDIA), 1 XPU (Intel)";
    assert_eq!(error.to_string(), message);
    assert_eq!(error.help(), ["choose a kind: `cluster.devices: cuda` or `xpu`"]);
    let job = job_with_devices(DeviceSelection::Auto);
    assert!(auto.check_worker_count(&job, 3, &mixed).is_ok(), "the program chooses");
    assert!(!auto.computes_on_cpus());
    assert_eq!(
        (auto.device_label_of_worker(0), auto.build_env(VisibleDevices::All, 0)),
        ("unknown".into(), vec![])
    );
    let mut one = job;
    one.run.visible_devices = VisibleDevices::One;
    assert_eq!(
        auto.check_worker_count(&one, 1, &mixed).expect_err("mixed").code(),
        codes::ACCELERATORS_MIXED
    );
    assert_eq!(select(DeviceSelection::List(vec![0])).expect_err("mixed").code(), codes::ACCELERATORS_MIXED);
    let chosen = |devices| select(devices).expect("a kind").count();
    assert_eq!(chosen(DeviceSelection::Cuda), 2);
    assert_eq!(chosen(DeviceSelection::Kind(AcceleratorKind::Xpu)), 1);
    let error = select(DeviceSelection::Kind(AcceleratorKind::Npu)).expect_err("no NPU");
    assert_eq!(error.code(), codes::GPU_REQUIRED);
    let listed =
        HostInventory { inherited_env: vec![("ZE_AFFINITY_MASK".into(), "0".into())], ..mixed.clone() };
    let found = select_accelerators(&job_with_devices(DeviceSelection::Auto), &listed).expect("XPUs");
    assert_eq!((found.kind, found.count()), (AcceleratorKind::Xpu, 1));
    // `cpu` hides both kinds.
    let hidden = select(DeviceSelection::Cpu).expect("hidden").build_env(VisibleDevices::All, 0);
    let expected = [("CUDA_VISIBLE_DEVICES", ""), ("ONEAPI_DEVICE_SELECTOR", "*:cpu")];
    assert_eq!(hidden, expected.map(|(name, value)| (name, value.to_owned())));
}

#[test]
fn accelerators_that_cannot_be_hidden_are_an_error() {
    let cpu = |kind| {
        let selection =
            select_accelerators(&job_with_devices(DeviceSelection::Cpu), &build_host(kind, 1, &[]));
        selection.map(|s| s.build_env(VisibleDevices::All, 0).last().cloned())
    };
    let error = cpu(AcceleratorKind::Npu).expect_err("no documented value");
    assert_eq!((error.code(), error.field("kind")), (codes::ACCELERATORS_NOT_HIDDEN, Some(&"npu".into())));
    // HIP ignores an empty list.
    assert_eq!(cpu(AcceleratorKind::Rocm), Ok(Some(("HIP_VISIBLE_DEVICES", "-1".to_owned()))));
}

#[test]
fn workers_on_mig_instances_need_one_each() {
    let host = build_host(AcceleratorKind::Mig, 3, &[]);
    let mut job = job_with_devices(DeviceSelection::Auto);
    let check = |job: &JobSpec, host: &HostInventory, workers| {
        let selection = select_accelerators(job, host).expect("instances");
        selection.check_worker_count(job, workers, host).map_err(|error| error.code())
    };
    assert_eq!(check(&job, &host, 1), Ok(()));
    assert_eq!(check(&job, &host, 3), Err(codes::MIG_INSTANCES_SHARED));
    job.run.visible_devices = VisibleDevices::One;
    assert_eq!((check(&job, &host, 3), check(&job, &host, 4)), (Ok(()), Err(codes::GPUS_TOO_FEW)));
    let mut unnamed = host;
    unnamed.accelerators[1].uuid = None;
    assert_eq!(check(&job, &unnamed, 2), Err(codes::ACCELERATORS_UNNAMED));
    job.run.visible_devices = VisibleDevices::All;
    assert_eq!(check(&job, &unnamed, 1), Ok(()), "no name is needed");
}

/// Checks that a job that requires accelerators is rejected with too few, and that a warning
/// reports workers without one otherwise.
#[test]
fn more_workers_than_accelerators_are_reported() {
    let host = build_host(AcceleratorKind::Npu, 2, &[]);
    let select = |devices: DeviceSelection, workers| {
        let job = job_with_devices(devices);
        let selection = select_accelerators(&job, &host).expect("NPUs");
        let warning = selection.find_shared_warning("h", workers).map(|warning| warning.to_string());
        (selection.check_worker_count(&job, workers, &host).map_err(|e| e.to_string()), warning)
    };
    assert_eq!(select(DeviceSelection::Auto, 2), (Ok(()), None));
    assert_eq!(select(DeviceSelection::Auto, 3), (Ok(()), Some("3 workers on h have 2 NPUs".into())));
    let (error, _) = select(DeviceSelection::Kind(AcceleratorKind::Npu), 3);
    assert_eq!(error, Err("the job places 3 workers on h, which has 2 NPUs".into()));
}

#[test]
fn a_process_of_jax_gets_a_gpu_if_each_worker_has_one() {
    use VisibleDevices::{All, One};
    let device = |kind, policy, rank, workers| {
        let host = build_host(kind, 4, &[]);
        let selection = select_accelerators(&job_with_devices(DeviceSelection::Auto), &host).expect("GPUs");
        selection.jax_device_of_worker(policy, rank, workers)
    };
    assert_eq!(device(AcceleratorKind::Cuda, All, 3, 4), Some(3));
    assert_eq!(device(AcceleratorKind::Rocm, All, 1, 2), Some(1));
    assert_eq!(device(AcceleratorKind::Cuda, All, 0, 1), None, "one process uses all GPUs");
    assert_eq!(device(AcceleratorKind::Cuda, One, 3, 4), None, "the process sees one GPU");
    assert_eq!(device(AcceleratorKind::Cuda, All, 3, 5), None, "there are too few GPUs");
    assert_eq!(device(AcceleratorKind::Npu, All, 3, 4), None);
}

#[test]
fn devices_of_other_kinds_are_not_cpus() {
    let on_cpus = |host: &HostInventory, devices| {
        select_accelerators(&job_with_devices(devices), host).expect("selected").computes_on_cpus()
    };
    let none = build_host(AcceleratorKind::Cuda, 0, &[]);
    assert!(on_cpus(&none, DeviceSelection::Auto));
    assert!(!on_cpus(&build_host(AcceleratorKind::Cuda, 1, &[]), DeviceSelection::Auto));
    assert!(on_cpus(&build_host(AcceleratorKind::Cuda, 1, &[]), DeviceSelection::Cpu));
    assert!(on_cpus(
        &build_host(AcceleratorKind::Cuda, 1, &[("CUDA_VISIBLE_DEVICES", "")]),
        DeviceSelection::Auto
    ));
    assert!(!on_cpus(&HostInventory::unknown("h"), DeviceSelection::Auto));
    assert!(!on_cpus(&HostInventory { has_other_devices: true, ..none }, DeviceSelection::Auto));
}
