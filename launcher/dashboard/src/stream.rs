//! [`RunStream`]: creates the server-sent events that keep a page of the dashboard up to date.
use crate::{
    dashboard::{Dashboard, lock_ignoring_poison},
    tracked_run::RunReadPosition,
};
use std::collections::BTreeMap;

/// The largest number of runs that one page of the dashboard shows at once.
pub(crate) const MAX_STREAM_RUNS: usize = 4;

/// The runs that a page of the dashboard shows, and how much of the data of each run was already
/// sent to the page.
#[derive(Debug)]
pub(crate) struct RunStream {
    positions: BTreeMap<String, RunReadPosition>,
}

impl RunStream {
    /// Creates the stream for a page that shows the runs with the IDs `runs`, and that has received
    /// no data yet.
    pub(crate) fn new<'r>(runs: impl Iterator<Item = &'r str>) -> RunStream {
        let positions = runs.take(MAX_STREAM_RUNS).map(|run| (run.to_owned(), RunReadPosition::default()));
        RunStream { positions: positions.collect() }
    }

    /// Reads new data of the runs that the page shows, and returns it as server-sent events. Also
    /// returns whether a journal has more data that can be read at once. Blocks while it reads.
    pub(crate) fn build_messages(&mut self, dashboard: &Dashboard) -> (String, bool) {
        let (mut messages, mut has_more) = (String::new(), false);
        for (run, position) in &mut self.positions {
            let Some(shared) = dashboard.find_or_track_run(run) else {
                messages.push_str(&format_message("missing", &run));
                continue;
            };
            let mut tracked = lock_ignoring_poison(&shared);
            has_more |= !tracked.refresh(dashboard.source());
            if let Some(update) = tracked.take_update(position) {
                messages.push_str(&format_message("run", &update));
            }
        }
        // A run that does not exist is reported once.
        self.positions.retain(|run, _| dashboard.find_or_track_run(run).is_some());
        (messages, has_more)
    }
}

/// Formats a server-sent event of the type `kind` with `value` as its JSON data. JSON contains no
/// line breaks.
fn format_message(kind: &str, value: &impl serde::Serialize) -> String {
    let json = serde_json::to_string(value).unwrap_or_default();
    format!("event: {kind}\ndata: {json}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::untrusted::testing::{append_to_journal, build_dashboard};

    #[test]
    fn a_page_gets_the_whole_run_and_then_the_changes() {
        let (directory, dashboard) = build_dashboard("job");
        let mut stream = RunStream::new(["r1", "absent"].into_iter());
        let (first, has_more) = stream.build_messages(&dashboard);
        assert!(first.starts_with("event: missing\ndata: \"absent\"\n\nevent: run\ndata: {\"reset\":true,"));
        assert!(!has_more && first.contains(r#""job":{"#), "{first}");
        assert_eq!(stream.build_messages(&dashboard), (String::new(), false));
        append_to_journal(
            &directory,
            r#"{"event":"eval","step":3,"loss":2.0,"perplexity":7.0,"tokens":5,"time":106.0}"#,
        );
        let (second, _) = stream.build_messages(&dashboard);
        assert!(second.contains(r#""reset":false"#) && !second.contains(r#""job":"#), "{second}");
        assert!(
            second.contains(r#""eval_loss":{"generation":1,"from":0,"buckets":[[3.0,2.0]]}"#),
            "{second}"
        );
        assert_eq!(second.matches("\n\n").count(), 1);
    }
}
