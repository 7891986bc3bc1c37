//! [`HostfileWatch`]: finds out, while a job runs, which hosts were added to the job's hostfile and
//! which hosts are no longer listed in the file.
use super::file_watch::{WatchedFileContent, watch_file};
use crate::{
    cluster::{ClusterHost, HostTarget, resolve_hostfile_text},
    format::format_first_error,
};
use diagnostic::{Diagnostic, codes};
use jobspec::{
    ClusterSpec, HostSelection, JobSpec,
    hosts::{HostAddress, MAX_HOSTFILE_BYTES, MAX_HOSTS},
};
use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
};
use tokio::sync::mpsc;

/// The largest number of host names that a notice about a changed hostfile lists per category, such
/// as added hosts. A notice gives only the number of the other hosts.
const MAX_LISTED_NAMES: usize = 8;

/// The hostfile of a job, with the filters (`include`, `exclude`) that the job applies to it.
#[derive(Clone, Debug)]
pub(crate) struct FilteredHostfile {
    path: PathBuf,
    cluster: ClusterSpec,
}

impl FilteredHostfile {
    /// Returns the hostfile of the job, or `None` if the job has another source of hosts.
    pub(crate) fn from_job(job: &JobSpec) -> Option<FilteredHostfile> {
        let HostSelection::File(file) = &job.cluster.hosts else { return None };
        Some(FilteredHostfile { path: job.run.workdir.join(file), cluster: job.cluster.clone() })
    }

    /// Parses the text of a hostfile and applies the job's filters (`include`, `exclude`). Fails if
    /// no host is left.
    fn parse_hosts(&self, text: &str) -> Result<Vec<ClusterHost>, Vec<Diagnostic>> {
        let hosts = resolve_hostfile_text(&self.cluster, &self.path, text)?;
        if hosts.is_empty() {
            let message = format!("no host of {} is left", self.path.display());
            return Err(vec![Diagnostic::error(codes::run::TOO_FEW_HOSTS, message)]);
        }
        Ok(hosts)
    }
}

/// What a changed hostfile means for the run: notices for the user, and the new list of the run's
/// hosts.
#[derive(Debug, Default, PartialEq)]
pub(super) struct HostfileChange {
    /// Notices that describe the change, or its errors, to the user.
    pub(super) notices: Vec<String>,
    /// The hosts after the change; `None` if the run keeps the previous list of hosts.
    pub(super) hosts: Option<ListedHosts>,
}

/// The hosts of a changed hostfile: the newly added hosts, and for each earlier host whether the
/// file still lists it.
#[derive(Debug, Default, PartialEq)]
pub(super) struct ListedHosts {
    /// Hosts that the run did not know before the change.
    pub(super) added: Vec<HostTarget>,
    /// For each host that the run knew before the change, by host index, whether the changed file
    /// lists the host.
    pub(super) listed: Vec<bool>,
    /// The addresses of all hosts in the changed file, for the transport.
    pub(super) addresses: Vec<HostAddress>,
}

/// Watches the hostfile of a run for changes, and knows which hosts the file listed before. A run
/// without a hostfile gets no changes.
pub(super) struct HostfileWatch {
    file: Option<(FilteredHostfile, mpsc::Receiver<WatchedFileContent>)>,
    /// For each known host, by host index, whether the file listed the host after the last change.
    listed: Vec<bool>,
    /// The address of each listed host after the last change, by the host's name. Empty before the
    /// first change.
    addresses: HashMap<String, HostAddress>,
}

impl HostfileWatch {
    /// Starts to watch the hostfile of a run, so that added and removed hosts are noticed while the
    /// job runs. `hosts` are the hosts of the run. Without a hostfile, the watch reports no change.
    /// With `reports_first`, the present content counts as a change.
    pub(super) fn start(
        file: Option<FilteredHostfile>,
        hosts: &[HostTarget],
        reports_first: bool,
    ) -> HostfileWatch {
        let names: HashSet<String> = hosts.iter().map(|h| h.name.clone()).collect();
        let watch = |file: FilteredHostfile| {
            let (path, hostfile) = (file.path.clone(), file.clone());
            // Text that ends within a line, or lacks hosts of the run, may be partially written.
            let is_complete = move |text: &str| {
                let hosts = text.ends_with('\n').then(|| hostfile.parse_hosts(text).ok()).flatten();
                hosts.is_some_and(|hosts| {
                    let listed: HashSet<String> = hosts.iter().map(|h| h.host.name_with_port()).collect();
                    names.iter().all(|name| listed.contains(name))
                })
            };
            (file, watch_file(path, MAX_HOSTFILE_BYTES as u64, reports_first, is_complete))
        };
        HostfileWatch { file: file.map(watch), listed: vec![true; hosts.len()], addresses: HashMap::new() }
    }

    /// Waits for the next change of the job's hostfile and returns its new content. Waits forever
    /// without a hostfile. Cancel-safe.
    pub(super) async fn wait_for_change(&mut self) -> WatchedFileContent {
        let content = match &mut self.file {
            Some((_, receiver)) => receiver.recv().await,
            None => None,
        };
        match content {
            Some(content) => content,
            None => std::future::pending().await,
        }
    }

    /// Compares the new content of the job's hostfile with the hosts of the run, and returns the
    /// hosts after the change with notices for the user. The caller must append the added hosts of
    /// the result to `hosts`.
    ///
    /// If the hostfile cannot be read, is not valid or lists too many hosts, the result has a
    /// notice and no hosts, and `hosts` stays unchanged.
    pub(super) fn evaluate_change(
        &mut self,
        hosts: &mut [HostTarget],
        content: WatchedFileContent,
    ) -> HostfileChange {
        let Some((file, _)) = &self.file else { return HostfileChange::default() };
        let name = file.path.display();
        let notice = |notice: String| HostfileChange { notices: vec![notice], hosts: None };
        let text = match content {
            WatchedFileContent::Text(text) => text,
            WatchedFileContent::Unreadable(error) => {
                return notice(format!(
                    "cannot read the hostfile {name}: {error}; the run continues unchanged"
                ));
            }
        };
        let in_file = match file.parse_hosts(&text) {
            Ok(hosts) => hosts,
            Err(errors) => {
                return notice(format!(
                    "the changed hostfile is not valid, and the run continues unchanged: {}",
                    format_first_error(&errors)
                ));
            }
        };
        let known: HashMap<String, usize> =
            hosts.iter().enumerate().map(|(id, h)| (h.name.clone(), id)).collect();
        let new: Vec<&ClusterHost> =
            in_file.iter().filter(|h| !known.contains_key(&h.host.name_with_port())).collect();
        if hosts.len() + new.len() > MAX_HOSTS {
            return notice(format!(
                "the change of the hostfile {name} is ignored: with it the run would have {} hosts, and \
                 the limit is {MAX_HOSTS}",
                hosts.len() + new.len()
            ));
        }
        let mut listed = vec![false; hosts.len()];
        let mut resized = Vec::new();
        for host in &in_file {
            let Some(&id) = known.get(&host.host.name_with_port()) else { continue };
            listed[id] = true;
            let target = HostTarget { local: hosts[id].local, ..HostTarget::from_cluster_host(host) };
            if target != hosts[id] {
                resized.push(target.name.clone());
                hosts[id] = target;
            }
        }
        self.replace_listed_hosts(hosts, &new, &in_file, listed, resized)
    }

    /// Remembers which hosts a changed hostfile lists, and returns these hosts with a notice that
    /// describes the differences for the user. If hosts, slots and addresses are unchanged, the
    /// result has neither hosts nor notices.
    ///
    /// `hosts` are the hosts that the run knows, and `listed` states for each of them whether the
    /// new list contains it. `new` are the hosts that the run does not know, `in_file` all hosts of
    /// the file, and `resized` the names of the hosts whose slots have changed.
    fn replace_listed_hosts(
        &mut self,
        hosts: &[HostTarget],
        new: &[&ClusterHost],
        in_file: &[ClusterHost],
        listed: Vec<bool>,
        resized: Vec<String>,
    ) -> HostfileChange {
        let changed_to = |to: bool| {
            let both = self.listed.iter().zip(&listed).zip(hosts);
            let changed = both.filter(|((before, now), _)| **now == to && before != now);
            changed.map(|(_, host)| host.name.clone()).collect::<Vec<_>>()
        };
        let changes = [
            ("added", new.iter().map(|h| h.host.name_with_port()).collect()),
            ("listed again", changed_to(true)),
            ("no longer listed", changed_to(false)),
            ("other slots from the next attempt on", resized),
        ];
        let parts: Vec<String> = changes
            .iter()
            .filter(|(_, names)| !names.is_empty())
            .map(|(what, names)| format!("{what}: {}", join_host_names(names)))
            .collect();
        let addresses: HashMap<String, HostAddress> =
            in_file.iter().map(|h| (h.host.name_with_port(), h.host.clone())).collect();
        let unchanged = parts.is_empty() && (self.addresses.is_empty() || self.addresses == addresses);
        self.addresses = addresses;
        if unchanged {
            return HostfileChange::default();
        }
        let notice = (!parts.is_empty()).then(|| format!("the hostfile has changed ({})", parts.join("; ")));
        self.listed.clone_from(&listed);
        self.listed.extend(new.iter().map(|_| true));
        HostfileChange {
            notices: notice.into_iter().collect(),
            hosts: Some(ListedHosts {
                added: new.iter().map(|h| HostTarget::from_cluster_host(h)).collect(),
                listed,
                addresses: in_file.iter().map(|h| h.host.clone()).collect(),
            }),
        }
    }
}

/// Joins host names with commas for a notice about a changed hostfile. Lists at most
/// [`MAX_LISTED_NAMES`] names, followed by the number of the other names.
fn join_host_names(names: &[String]) -> String {
    match names.len().checked_sub(MAX_LISTED_NAMES) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..MAX_LISTED_NAMES].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::file_watch::FileReadError;

    /// Creates the watch and the hosts of a run whose hostfile has the content `text`. `cluster` is
    /// the `cluster` section of the job file.
    fn create_watch(cluster: &str, text: &str) -> (HostfileWatch, Vec<HostTarget>) {
        let job = format!("run: {{command: [a]}}\ncluster: {cluster}");
        let source = jobspec::JobSource::Text { name: "job.yaml".into(), text: job };
        let job = jobspec::load_job(source, &[]).expect("a job").0;
        let file = FilteredHostfile::from_job(&job).expect("a hostfile");
        let hosts: Vec<HostTarget> =
            file.parse_hosts(text).expect("hosts").iter().map(HostTarget::from_cluster_host).collect();
        let listed = vec![true; hosts.len()];
        let file = Some((file, mpsc::channel(1).1));
        (HostfileWatch { file, listed, addresses: HashMap::new() }, hosts)
    }

    /// Compares the notices with the snapshot `name`, in which the directory of the hostfile is
    /// left out.
    fn assert_notices(name: &str, notices: &[String]) {
        let mut settings = insta::Settings::clone_current();
        settings.add_filter(r"/\S*/hosts\b", "hosts");
        settings.bind(|| insta::assert_snapshot!(name, notices.join("\n")));
    }

    /// Applies `text` as the changed content of the hostfile, and adds new hosts to `hosts`.
    /// Returns the notices and, if the list of hosts changed, whether each known host is listed.
    fn apply_text(
        watch: &mut HostfileWatch,
        hosts: &mut Vec<HostTarget>,
        text: &str,
    ) -> (Vec<String>, Option<Vec<bool>>) {
        let change = watch.evaluate_change(hosts, WatchedFileContent::Text(text.to_owned()));
        let listed = change.hosts.map(|change| {
            hosts.extend(change.added);
            change.listed
        });
        (change.notices, listed)
    }

    #[test]
    fn hosts_are_added_removed_and_listed_again() {
        let (mut watch, mut hosts) = create_watch("{hosts: {file: hosts}}", "a slots=2\nb slots=2\n");
        let mut all_notices = Vec::new();
        let many: String = (0..12).map(|i| format!("n{i}\n")).collect();
        for (text, expected) in [
            ("# a comment\na slots=2\nb slots=2\n", None),
            ("c slots=1\nb slots=2\n", Some(vec![false, true])),
            ("a slots=2\nb slots=4\nc slots=1\n", Some(vec![true, true, true])),
            (&format!("a slots=2\nb slots=4\nc slots=1\n{many}"), Some(vec![true, true, true])),
        ] {
            let (notices, listed) = apply_text(&mut watch, &mut hosts, text);
            assert_eq!(listed, expected, "{text}");
            all_notices.extend(notices);
        }
        assert_notices("added_removed_and_listed_again", &all_notices);
        let names: Vec<&str> = hosts.iter().take(4).map(|h| h.name.as_str()).collect();
        assert_eq!((names, hosts[1].slots), (vec!["a", "b", "c", "n0"], Some(4)));
    }

    #[test]
    fn another_address_of_a_host_is_taken_over_without_a_notice() {
        let (mut watch, mut hosts) = create_watch("{hosts: {file: hosts}}", "a\nb\n");
        apply_text(&mut watch, &mut hosts, "a\nb\nc\n");
        let change = watch.evaluate_change(&mut hosts, WatchedFileContent::Text("me@a\nb\nc\n".to_owned()));
        let listed = change.hosts.expect("a change");
        assert!(change.notices.is_empty() && listed.added.is_empty(), "{:?}", change.notices);
        assert_eq!(listed.addresses[0].user.as_deref(), Some("me"));
    }

    #[test]
    fn filters_apply_and_an_invalid_hostfile_changes_nothing() {
        let (mut watch, mut hosts) = create_watch("{hosts: {file: hosts}, exclude: [b]}", "a\nb\nc\n");
        let before = hosts.clone();
        let mut all_notices = Vec::new();
        for (text, is_valid) in [
            ("a\nb\nc\nd\n", true),
            ("a\nb\nb slots=\n", false),
            ("", false),
            ("a\nc\n", false),
            ("a slots=0\nb\n", false),
            ("b\n", false),
        ] {
            let (notices, listed) = apply_text(&mut watch, &mut hosts, text);
            assert_eq!((listed.is_some(), notices.len()), (is_valid, 1), "{text}: {notices:?}");
            all_notices.extend(notices);
        }
        let gone = watch.evaluate_change(&mut hosts, WatchedFileContent::Unreadable(FileReadError::Missing));
        assert_eq!(gone.hosts, None);
        all_notices.extend(gone.notices);
        assert_notices("filters_and_invalid_hostfiles", &all_notices);
        assert_eq!(hosts[..2], before[..]);
    }

    #[test]
    fn a_run_has_a_limit_of_hosts() {
        let (mut watch, mut hosts) = create_watch("{hosts: {file: hosts}}", "a\n");
        let (notices, listed) = apply_text(&mut watch, &mut hosts, &format!("n[1-{MAX_HOSTS}]\n"));
        assert_eq!((listed, notices.len()), (None, 1), "{notices:?}");
    }
}
