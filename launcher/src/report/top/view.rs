//! Draws the screen of `launch top`.
use super::{
    host_lines::{describe_rank, format_hosts},
    top_state::TopState,
};
use crate::{format::format_number, report::event_text::format_event};
use dashboard::RunSnapshot;
use diagnostic::{
    quantity::{format_bytes, format_duration},
    terminal_text::filter_line,
};
use protocol::event::Event;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Borders, Paragraph, Sparkline},
};
use serde_json::Value;

/// The terminal width, in columns, from which on `launch top` also shows the loss curve and places
/// the events next to the log.
const MIN_WIDE_COLUMNS: u16 = 120;
/// The largest number of lines that `launch top` uses for hosts, without the border.
const MAX_HOST_LINES: u16 = 20;
/// The height of the curve of the loss in `launch top`, in lines with its border.
const CURVE_LINES: u16 = 6;

/// Draws the whole screen of `launch top`.
pub(super) fn draw_screen(frame: &mut Frame, state: &TopState) {
    let area = frame.area();
    let Some(run) = &state.run else {
        return frame.render_widget(Paragraph::new("reading the run…"), area);
    };
    let is_wide = area.width >= MIN_WIDE_COLUMNS;
    let slow = state.list_straggler_messages();
    let hosts = (run.hosts.len() as u16).clamp(1, MAX_HOST_LINES).min(area.height / 4) + 2;
    let curve = if is_wide && area.height >= 40 { CURVE_LINES } else { 0 };
    let [head, warnings, loss, grid, detail, body, foot] = Layout::vertical([
        Constraint::Length(3),
        Constraint::Length((slow.len() as u16).min(3)),
        Constraint::Length(curve),
        Constraint::Length(hosts),
        Constraint::Length(1),
        Constraint::Min(4),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(format_header(run)), head);
    let warning = Style::new().fg(Color::Red);
    frame.render_widget(
        Paragraph::new(slow.into_iter().map(|text| Line::styled(text, warning)).collect::<Vec<_>>()),
        warnings,
    );
    if curve > 0 {
        draw_losses(frame, run, loss);
    }
    let title = format!(" hosts and ranks ({}) ", run.world);
    let lines =
        format_hosts(run, state.selected, grid.height.saturating_sub(2), grid.width.saturating_sub(2));
    frame.render_widget(Paragraph::new(lines).block(build_border(title)), grid);
    frame.render_widget(Paragraph::new(describe_rank(run, state.selected)), detail);
    let halves = [Constraint::Percentage(50), Constraint::Percentage(50)];
    let [events, log] = match is_wide {
        true => Layout::horizontal(halves).areas(body),
        false => Layout::vertical(halves).areas(body),
    };
    let texts = run.events.iter().map(format_event_line).filter(|text| state.matches_search(text)).collect();
    draw_last_lines(frame, " events ".into(), texts, events);
    let lines: Vec<String> =
        state.log.iter().map(|line| filter_line(line)).filter(|line| state.matches_search(line)).collect();
    draw_last_lines(frame, format!(" log of rank {} ", state.selected), lines, log);
    frame.render_widget(Paragraph::new(format_footer(state)), foot);
}

/// Formats the first lines of the screen: the state of the run, its step, loss and speed.
fn format_header(run: &RunSnapshot) -> Vec<Line<'static>> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let color = match run.info.state {
        "running" => Color::Green,
        "done" => Color::Cyan,
        _ => Color::Yellow,
    };
    let number = |value: Option<f64>, format: fn(f64) -> String| value.map_or_else(|| "–".into(), format);
    let steps = match (run.step, run.total_steps) {
        (Some(step), Some(total)) if total > 0 => {
            format!("step {step} of {total} ({:.0} %)", step as f64 / total as f64 * 100.0)
        }
        (Some(step), _) => format!("step {step}"),
        (None, _) => "no steps yet".into(),
    };
    let loss = number(run.loss, |loss| format!("{loss:.4}"));
    let eval = run.eval_loss.map_or_else(String::new, |loss| format!("  eval loss {loss:.4}"));
    let speed = number(run.tokens_per_s, |speed| format!("{} tokens/s", format_number(speed)));
    let step_s = number(run.step_s, format_duration);
    let memory = run.peak_rss.map_or_else(|| "–".into(), format_bytes);
    vec![
        Line::from(vec![
            Span::styled(filter_line(&run.info.name), bold),
            Span::raw(format!("  {}  ", filter_line(&run.info.run))),
            Span::styled(run.info.state, Style::new().fg(color).add_modifier(Modifier::BOLD)),
            Span::raw(format!("  {steps}")),
        ]),
        Line::raw(format!("loss {loss}{eval}  {speed}  step time {step_s}")),
        Line::raw(format!(
            "memory {memory}  attempt {}  restarts {}  checkpoints {}",
            run.attempt, run.restarts, run.checkpoints
        )),
    ]
}

/// Draws the curve of the loss into an area of the screen. The lowest loss has the lowest bar.
fn draw_losses(frame: &mut Frame, run: &RunSnapshot, area: Rect) {
    let columns = usize::from(area.width.saturating_sub(2)).max(1);
    let finite: Vec<f64> = run.losses.iter().map(|(_, loss)| *loss).collect();
    let (low, high) = finite
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), loss| (low.min(*loss), high.max(*loss)));
    let scale = |loss: f64| if high > low { ((loss - low) / (high - low) * 1000.0) as u64 + 1 } else { 1 };
    let points = finite.len();
    let column = |at: usize| scale(finite[at * points / columns]);
    let bars: Vec<u64> = match points {
        0 => Vec::new(),
        _ if points <= columns => finite.iter().map(|loss| scale(*loss)).collect(),
        _ => (0..columns).map(column).collect(),
    };
    let title = if points > 0 { format!(" loss {high:.4} to {low:.4} ") } else { " loss ".into() };
    frame.render_widget(Sparkline::default().data(bars).block(build_border(title)), area);
}

/// Draws the last lines of a text that fit into an area of the screen.
fn draw_last_lines(frame: &mut Frame, title: String, lines: Vec<String>, area: Rect) {
    let fitting = usize::from(area.height.saturating_sub(2));
    let first = lines.len().saturating_sub(fitting);
    let lines: Vec<Line> = lines.into_iter().skip(first).map(Line::raw).collect();
    frame.render_widget(Paragraph::new(lines).block(build_border(title)), area);
}

/// Builds the border, with the title `title`, of an area of the screen of `launch top`.
fn build_border(title: String) -> Block<'static> {
    Block::new().borders(Borders::ALL).title(title)
}

/// Formats an event of the run's journal as one line of text, or as JSON if this version of launch
/// does not know the event.
fn format_event_line(event: &Value) -> String {
    let text = match Event::from_json(&event.to_string()) {
        Ok(event) => format_event(&event),
        Err(_) => event.to_string(),
    };
    filter_line(&text)
}

/// Formats the last line of the screen, which shows the available keys or the text of the search.
fn format_footer(state: &TopState) -> Line<'static> {
    match (&state.input, state.filter.is_empty()) {
        (Some(input), _) => Line::raw(format!("/{}", filter_line(input))),
        (None, false) => {
            Line::raw(format!("lines with \"{}\"   Esc all lines   q quit", filter_line(&state.filter)))
        }
        (None, true) => Line::raw("q quit   ←→ rank   ↑↓ host   / search"),
    }
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
