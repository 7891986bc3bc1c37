//! What happened, in a sentence.
use super::text::{bytes, hosts as named, short, took};
use contract::{event::Event, ids::Rank};

/// An event for a person, on one line (a failure's last lines follow it).
pub(crate) fn sentence(event: &Event) -> String {
    match event {
        Event::Start { run, run_dir, world } => {
            let s = if *world == 1 { "" } else { "s" };
            format!("run {run}: {world} worker{s}, files in {}", run_dir.display())
        }
        Event::Ready { step, total_steps, parameters, tokens_per_step } => {
            let (parameters, tokens) = (short(*parameters as f64), short(*tokens_per_step as f64));
            format!(
                "training {parameters} parameters from step {step} to {total_steps}, {tokens} tokens a step"
            )
        }
        Event::Resume { step, path, world, stage } => {
            let at = stage.map_or_else(String::new, |stage| format!(" at ZeRO stage {stage}"));
            let by = world.map_or_else(String::new, |world| format!(" (written by {world} workers{at})"));
            format!("going on from step {step} of {}{by}", path.display())
        }
        Event::Step { step, loss, grad_norm, lr, tokens_per_s, .. } => {
            let speed = short(*tokens_per_s);
            format!("step {step}  loss {loss:.4}  grad norm {grad_norm:.3}  lr {lr:.3e}  {speed} tokens/s")
        }
        Event::Overflow { step, loss_scale, skipped, .. } => {
            format!(
                "step {step}: a gradient overflowed fp16, skipped ({skipped} so far); loss scale {loss_scale}"
            )
        }
        Event::Eval { step, loss, perplexity, .. } => {
            format!("step {step}: held-out loss {loss:.4}, perplexity {perplexity:.2}")
        }
        Event::Sample { step, prompt, text } => {
            format!("step {step}: {prompt:?} goes on {text:?}")
        }
        Event::Checkpoint { step, path, bytes: size, seconds } => {
            format!("step {step}: checkpoint {} ({} in {seconds:.1} s)", path.display(), bytes(*size))
        }
        Event::Gathered { step, path, bytes: size } => {
            format!("step {step}: weights {} ({})", path.display(), bytes(*size))
        }
        Event::Reload { step, .. } => format!("the changed job file holds from step {} on", step + 1),
        Event::Notice { rank: None, message } => message.clone(),
        Event::Notice { rank: Some(rank), message } => format!("rank {rank}: {message}"),
        Event::Placed { epoch, world, hosts } => {
            let again = if *epoch > 0 { "again " } else { "" };
            format!("starting {again}{world} workers on {}", named(hosts))
        }
        Event::Failure { rank, host, pid, cause, .. } => failed(*rank, host, *pid, cause),
        Event::Restart { epoch, left, pause_s, rank, host, pid, cause, .. } => {
            let (failed, total) = (failed(*rank, host, *pid, cause), u64::from(*epoch) + u64::from(*left));
            format!("{failed}; restart {epoch} of {total} in {pause_s:.1} s")
        }
        Event::Done { exit_code: 0, seconds, .. } => format!("done in {}", took(*seconds)),
        Event::Done { exit_code, seconds, .. } => {
            format!("ended with exit code {exit_code} after {}", took(*seconds))
        }
    }
}

/// What failed where.
pub(super) fn failed(rank: Option<Rank>, host: &str, pid: u32, cause: &str) -> String {
    let who = match rank {
        Some(rank) if pid != 0 => format!("rank {rank} (pid {pid} on {host}): "),
        Some(rank) => format!("rank {rank} (on {host}): "),
        None => String::new(),
    };
    format!("failed: {who}{cause}")
}
