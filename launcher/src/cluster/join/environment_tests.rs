//! Tests that the number, rank and address of a node are found in the environment variables of
//! other launchers.
use super::*;

/// Calls [`find_node_environment`] with the variables in `text`, which are written as `NAME=value
/// NAME=value`, on the host `web-2`. The file `nodes` has the hosts of a PBS job.
fn find_with(text: &str, scheduler: SchedulerVariables) -> diagnostic::Result<Option<NodeEnvironment>> {
    let variables: Vec<(&str, &str)> = text.split(' ').filter_map(|word| word.split_once('=')).collect();
    let get = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.replace('+', " "));
    let read_file = |path: &str| match path {
        "/etc/hosts" => {
            Some("127.0.0.1 localhost\n10.0.0.3\tweb-2.web.ns.svc.cluster.local\tweb-2\n".to_owned())
        }
        "nodes" => Some("web-1.example\nweb-1.example\nweb-2.example\n".to_owned()),
        _ => None,
    };
    find_node_environment(&ProcessEnvironment { get: &get, read_file: &read_file, host: "web-2", scheduler })
}

/// Describes the environment of a node as `NODES RANK ADDRESS`, with `-` for unknown parts.
fn describe(text: &str) -> String {
    describe_with(text, SchedulerVariables::default())
}

fn describe_with(text: &str, scheduler: SchedulerVariables) -> String {
    let found = match find_with(text, scheduler) {
        Ok(Some(found)) => found,
        Ok(None) => return "none".to_owned(),
        Err(error) => return error.code().info().name.to_owned(),
    };
    let nodes = found.nodes.map_or("-".to_owned(), |n| format!("{}:{}", n.min, n.max));
    let rank = found.node_rank.map_or("-".to_owned(), |rank| rank.to_string());
    let address = found.rendezvous.map_or("-".to_owned(), |address| address.to_string());
    format!("{nodes} {rank} {address}")
}

#[test]
fn launchers_describe_nodes_by_their_variables() {
    for (variables, expected) in [
        ("", "none"),
        ("HOME=/root", "none"),
        ("LAUNCH_NODES=4 LAUNCH_NODE_RANK=1 LAUNCH_RENDEZVOUS=h0:7", "4:4 1 h0:7"),
        ("LAUNCH_NODES=2:4 JOB_COMPLETION_INDEX=3", "2:4 3 -"),
        ("LAUNCH_NODES=1 PET_NNODES=4", "none"),
        ("PET_NNODES=4 PET_NODE_RANK=2 PET_MASTER_ADDR=p0 PET_MASTER_PORT=29500", "4:4 2 p0:29500"),
        ("PET_NNODES=1:4 PET_RDZV_ENDPOINT=p0:29400 PET_RDZV_BACKEND=c10d", "1:4 - p0:29400"),
        ("PET_NNODES=1 PET_NODE_RANK=0", "none"),
        ("WORLD_SIZE=3 RANK=1 MASTER_ADDR=job-master-0 MASTER_PORT=23456", "3:3 1 job-master-0:23456"),
        ("WORLD_SIZE=1 RANK=0 MASTER_ADDR=localhost MASTER_PORT=23456", "none"),
        ("WORLD_SIZE=3 MASTER_ADDR=a", "none"),
        ("JOB_COMPLETION_INDEX=2", "- 2 web-0.web.ns.svc.cluster.local:29400"),
        ("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=1", "2:2 1 -"),
        ("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 PBS_NODEFILE=nodes", "2:2 1 web-1.example:29400"),
        ("PMI_SIZE=2 PMI_RANK=0 MPI_LOCALNRANKS=1 LSB_MCPU_HOSTS=a+16+b+16", "2:2 0 a:29400"),
        ("PMIX_RANK=1 PBS_NODEFILE=nodes", "2:2 1 web-1.example:29400"),
        ("PMIX_RANK=1", "- 1 -"),
        ("LSB_MCPU_HOSTS=web-1+16+web-2+16", "2:2 1 web-1:29400"),
        ("LSB_HOSTS=web-2+web-2", "none"),
        ("PBS_NODEFILE=nodes", "2:2 1 web-1.example:29400"),
        ("PBS_NODEFILE=missing", "none"),
    ] {
        assert_eq!(describe(variables), expected, "{variables}");
    }
}

#[test]
fn several_processes_on_a_node_and_malformed_values_are_errors() {
    for (variables, code) in [
        ("RANK=1 LOCAL_RANK=1 WORLD_SIZE=8", "join-started-per-worker"),
        (
            "OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4",
            "join-started-per-worker",
        ),
        ("PMI_SIZE=8 PMI_RANK=1 MPI_LOCALNRANKS=4", "join-started-per-worker"),
        ("PET_NNODES=x", "join-nodes-invalid"),
        ("PET_NNODES=4:2", "join-nodes-invalid"),
        ("PET_NNODES=2 PET_NODE_RANK=-1", "join-nodes-invalid"),
        ("PET_NNODES=2 PET_MASTER_ADDR=a+b", "join-nodes-invalid"),
        ("LAUNCH_NODES=0", "join-nodes-invalid"),
    ] {
        assert_eq!(describe(variables), code, "{variables}");
    }
    assert_eq!(describe("RANK=0 LOCAL_RANK=0 WORLD_SIZE=1"), "none", "the only worker");
}

#[test]
fn an_allocation_belongs_to_its_provider_unless_a_step_has_several_tasks() {
    let allocated = SchedulerVariables { is_allocated: true, first_host: Some("n1".to_owned()), step: None };
    for variables in ["", "RANK=0 WORLD_SIZE=2 MASTER_ADDR=n1", "PET_NNODES=2", "PMI_SIZE=2 PMI_RANK=0"] {
        assert_eq!(describe_with(variables, allocated.clone()), "none", "{variables}");
    }
    assert_eq!(describe_with("LAUNCH_NODES=2", allocated.clone()), "2:2 - -");
    let mpi = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=1";
    assert_eq!(describe_with(mpi, allocated.clone()), "2:2 1 n1:29400");
    let step = |nodes, tasks| SchedulerVariables {
        step: Some(StepVariables { source: "the step".to_owned(), nodes, node_rank: 1, tasks }),
        ..allocated.clone()
    };
    assert_eq!(describe_with("PMI_SIZE=2 PMI_RANK=0", step(2, 2)), "2:2 1 n1:29400");
    assert_eq!(describe_with("", step(2, 8)), "join-started-per-worker");
    assert_eq!(describe_with("", step(1, 8)), "join-started-per-worker");
}
