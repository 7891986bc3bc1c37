//! [`read_slurm_variables`]: determines from Slurm's environment variables in which allocation and
//! step launch runs, and how many tasks the step has.
use super::allocation::expand_node_list;
use crate::cluster::join::{SchedulerVariables, StepVariables};

/// Determines from Slurm's environment variables in which Slurm allocation and step this process
/// runs. `get` returns the value of a variable. Malformed variables are ignored here, because
/// [`read_allocation`](super::allocation::read_allocation) reports them.
pub(in crate::cluster) fn read_slurm_variables(get: &dyn Fn(&str) -> Option<String>) -> SchedulerVariables {
    if get("SLURM_JOB_ID").is_none() {
        return SchedulerVariables::default();
    }
    let number = |name: &str| get(name).and_then(|text| text.parse::<u32>().ok());
    let tasks = number("SLURM_STEP_NUM_TASKS").filter(|tasks| *tasks > 1 && get("SLURM_STEP_ID").is_some());
    let step = tasks.and_then(|tasks| {
        let nodes = number("SLURM_STEP_NUM_NODES").or_else(|| number("SLURM_NNODES"))?;
        let node_rank = number("SLURM_NODEID")?;
        let source = "SLURM_STEP_NUM_TASKS and SLURM_NODEID".to_owned();
        Some(StepVariables { source, nodes, node_rank, tasks })
    });
    let list = get("SLURM_STEP_NODELIST").filter(|_| step.is_some()).or_else(|| get("SLURM_JOB_NODELIST"));
    let first_host = list.and_then(|list| expand_node_list(&list)?.into_iter().next());
    SchedulerVariables { is_allocated: true, step, first_host }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_with_several_tasks_is_distinguished_from_a_batch_script() {
        let read = |text: &str| {
            let variables: Vec<(&str, &str)> =
                text.split(' ').filter_map(|word| word.split_once('=')).collect();
            let get = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
            read_slurm_variables(&get)
        };
        assert!(!read("HOME=/").is_allocated);
        let batch = read("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[3-4] SLURM_STEP_NUM_TASKS=2");
        assert!(batch.is_allocated && batch.step.is_none());
        assert_eq!(batch.first_host.as_deref(), Some("n3"));
        let interactive = read("SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NODEID=0");
        assert!(interactive.step.is_none());
        let step = read(
            "SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[3-6] SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 \
             SLURM_STEP_NUM_NODES=2 SLURM_NODEID=1 SLURM_STEP_NODELIST=n[5-6]",
        );
        assert_eq!(step.first_host.as_deref(), Some("n5"));
        let step = step.step.expect("a step");
        assert_eq!((step.nodes, step.node_rank, step.tasks), (2, 1, 2));
    }
}
