//! Facts: what the machines are, found out and not assumed.
mod cgroup;
pub mod local;

/// What is known of one machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    pub host: String,
    /// The CPUs this process may run on, ascending; never empty.
    pub cpus: Vec<u32>,
    /// CPUs' worth of time that the control group grants, when it limits it.
    pub quota: Option<f64>,
    /// Memory that may be used, bytes: the machine's or the control group's limit; 0: unknown.
    pub memory: u64,
    /// What the user's environment has of [`contract::env::USERS_CHOICE`].
    pub chosen: Vec<(String, String)>,
}

impl Facts {
    /// Threads that can run at once: CPUs, or fewer when time is limited.
    pub fn cores(&self) -> u32 {
        let cpus = self.cpus.len() as u32;
        self.quota.map_or(cpus, |quota| cpus.min(quota.floor().max(1.0) as u32))
    }
}
