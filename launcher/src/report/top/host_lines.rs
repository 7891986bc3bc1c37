//! Formats the hosts of a run, with their ranks and their usage of CPU, memory and GPUs, as lines
//! for `launch top`.
use dashboard::{RankState, RunSnapshot, SnapshotHost};
use diagnostic::{
    quantity::{format_bytes, format_duration},
    terminal_text::filter_line,
};
use protocol::{control::HostUsage, run_measurements::RunMeasurements};
use ratatui::{
    style::{Color, Modifier, Style},
    text::{Line, Span},
};

/// The width of the host names in `launch top`, in columns.
const NAME_COLUMNS: usize = 14;
/// The width of a host's usage of CPU, memory and GPUs in `launch top`, in columns.
const USAGE_COLUMNS: usize = 46;

/// Formats one line of `launch top` for each of at most `height` hosts around the selected rank's
/// host, with the host's ranks and usage.
pub(super) fn format_hosts(run: &RunSnapshot, selected: u32, height: u16, width: u16) -> Vec<Line<'static>> {
    let has_selected = |host: &SnapshotHost| {
        (host.first_rank..host.first_rank.saturating_add(host.workers)).contains(&selected)
    };
    let at = run.hosts.iter().position(has_selected).unwrap_or(0);
    let height = usize::from(height).max(1);
    let first = at.saturating_sub(height / 2).min(run.hosts.len().saturating_sub(height));
    let cells = usize::from(width).saturating_sub(NAME_COLUMNS + USAGE_COLUMNS + 2).max(8);
    let hosts = run.hosts.iter().skip(first).take(height);
    hosts.map(|host| format_host(run, host, selected, cells)).collect()
}

/// Formats a host as one line of `launch top`: its name, the states of at most `cells` of its
/// ranks, and its usage.
fn format_host(run: &RunSnapshot, host: &SnapshotHost, selected: u32, cells: usize) -> Line<'static> {
    let name: String = filter_line(&host.host).chars().take(NAME_COLUMNS - 1).collect();
    let mut spans = vec![Span::raw(format!("{name:NAME_COLUMNS$}"))];
    let workers = host.workers as usize;
    let offset = (selected.saturating_sub(host.first_rank) as usize).min(workers);
    let skipped = if offset >= cells { (offset + 1 - cells).min(workers.saturating_sub(cells)) } else { 0 };
    let shown = workers.saturating_sub(skipped).min(cells);
    for position in skipped..skipped + shown {
        spans.push(format_rank(run, host.first_rank + position as u32, selected));
    }
    let padding = cells.min(workers.max(8)).saturating_sub(shown) + 2;
    spans.push(Span::raw(" ".repeat(padding)));
    let find_usage = |status: &RunMeasurements| {
        status.hosts.iter().find(|h| h.host == host.host).map(|h| format_usage(&h.usage))
    };
    spans.push(Span::raw(run.status.as_ref().and_then(find_usage).unwrap_or_default()));
    Line::from(spans)
}

/// Formats the cell that shows the state of one rank, in the line of the rank's host in `launch
/// top`.
fn format_rank(run: &RunSnapshot, rank: u32, selected: u32) -> Span<'static> {
    let is_slow = run.status.as_ref().is_some_and(|s| s.stragglers.iter().any(|report| report.rank == rank));
    let (letter, color) = match run.states.get(rank as usize) {
        Some(RankState::Running) if is_slow => ("S", Color::Red),
        Some(RankState::Running) => ("■", Color::Green),
        Some(RankState::Starting) => ("·", Color::Yellow),
        Some(RankState::Failed) => ("x", Color::Red),
        Some(RankState::Ended) => ("-", Color::DarkGray),
        Some(RankState::Done) => ("d", Color::Cyan),
        None => ("?", Color::DarkGray),
    };
    let style = Style::new().fg(color);
    Span::styled(letter, if rank == selected { style.add_modifier(Modifier::REVERSED) } else { style })
}

/// Formats a host's usage of CPU, memory and GPUs.
fn format_usage(usage: &HostUsage) -> String {
    let percent = |share: f64| format!("{:.0}%", share * 100.0);
    let per_second = |bytes: u64| format_bytes(bytes.saturating_mul(1000) / usage.interval_ms.max(1));
    let busy: Vec<f64> = usage.gpus.iter().filter_map(|gpu| gpu.busy_share).collect();
    let gpu = match busy.len() {
        0 => String::new(),
        count => format!(" gpu {}", percent(busy.iter().sum::<f64>() / count as f64)),
    };
    format!(
        "cpu {} mem {}{gpu} net {}/s",
        percent(usage.cpu_share),
        percent(usage.memory_used as f64 / usage.memory_total.max(1) as f64),
        per_second(usage.network_received.saturating_add(usage.network_sent)),
    )
}

/// Describes the rank that the user of `launch top` has selected: its state, step times and memory.
pub(super) fn describe_rank(run: &RunSnapshot, rank: u32) -> String {
    let state = match run.states.get(rank as usize) {
        Some(RankState::Running) => "running",
        Some(RankState::Starting) => "starting",
        Some(RankState::Failed) => "failed",
        Some(RankState::Ended) => "ended",
        Some(RankState::Done) => "done",
        None => "unknown",
    };
    let mut text = format!("rank {rank}: {state}");
    let Some(status) = &run.status else { return text };
    let steps = status.step_times.steps.max(1) as f64;
    if let Some(times) = status.step_times.ranks.get(rank as usize) {
        let seconds = |us: u64| format_duration(us as f64 / 1e6 / steps);
        text.push_str(&format!(
            ", step {}: work {}, waiting {}",
            seconds(times.step_us),
            seconds(times.work_us()),
            seconds(times.waiting_us)
        ));
    }
    let usages = status.hosts.iter().map(|host| &host.usage);
    let found = usages.flat_map(|usage| usage.workers.iter().map(move |w| (w, usage.interval_ms.max(1))));
    if let Some((worker, interval_ms)) = found.into_iter().find(|(worker, _)| worker.rank == rank) {
        let cpus = worker.cpu_us as f64 / 1000.0 / interval_ms as f64;
        text.push_str(&format!(", {cpus:.1} CPUs, {}", format_bytes(worker.rss)));
    }
    text
}
