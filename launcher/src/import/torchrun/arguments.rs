//! torchrun's command line, read as its own parser does: `--a-b x`, `--a_b=x`, beginnings that only one name has, `-m`, and
//! everything after the script is the script's.

/// Options that take a value.
const VALUES: &[&str] = &[
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "event-log-handler",
    "role",
    "log-dir",
    "redirects",
    "tee",
    "log-line-prefix-template",
    "local-ranks-filter",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "node-rank",
    "master-addr",
    "master-port",
    "local-addr",
    "logs-specs",
    "numa-binding",
    "signals-to-handle",
    "shutdown-timeout",
];
const FLAGS: &[&str] = &["standalone", "module", "no-python", "run-path", "virtual-local-rank"];
const SHORT: &[(&str, &str)] = &[("-m", "module"), ("-r", "redirects"), ("-t", "tee")];

/// What was given.
#[derive(Debug)]
pub(super) struct Given {
    options: Vec<(&'static str, String)>,
    /// The script, module or program, and its arguments.
    pub(super) program: Vec<String>,
}

impl Given {
    /// The last value of an option; it is taken.
    pub(super) fn value(&mut self, name: &str) -> Option<String> {
        let value = self.options.iter().rev().find(|(n, _)| *n == name).map(|(_, value)| value.clone());
        self.options.retain(|(n, _)| *n != name);
        value
    }

    /// The same, left there.
    pub(super) fn shown(&self, name: &str) -> Option<&str> {
        self.options.iter().rev().find(|(n, _)| *n == name).map(|(_, value)| value.as_str())
    }

    pub(super) fn flag(&mut self, name: &str) -> bool {
        self.value(name).is_some()
    }
}

/// Reads the arguments.
pub(super) fn read(args: &[String]) -> Result<Given, String> {
    let mut given = Given { options: Vec::new(), program: Vec::new() };
    let mut args = args.iter().peekable();
    // people copy the whole line
    args.next_if(|first| first.rsplit('/').next() == Some("torchrun"));
    while let Some(arg) = args.next() {
        if arg == "--" || !arg.starts_with('-') || arg == "-" {
            given.program.extend((arg != "--").then(|| arg.clone()));
            given.program.extend(args.cloned());
            break;
        }
        let (name, attached) = option(arg)?;
        let value = match (FLAGS.contains(&name), attached) {
            (true, Some(_)) => return Err(format!("`--{name}` takes no value")),
            (true, None) => String::new(),
            (false, Some(value)) => value,
            (false, None) => args.next().cloned().ok_or_else(|| format!("`--{name}` needs a value"))?,
        };
        given.options.push((name, value));
    }
    match given.program.first() {
        None => Err("no script is named after torchrun's own arguments".to_owned()),
        Some(script) if script.is_empty() => Err("the script's name is empty".to_owned()),
        Some(_) => Ok(given),
    }
}

/// The whole name of an option, and the value that is written with it.
fn option(arg: &str) -> Result<(&'static str, Option<String>), String> {
    let unknown = || format!("torchrun has no option `{}`", arg.escape_debug());
    let Some(long) = arg.strip_prefix("--") else {
        let found = SHORT.iter().find(|(short, _)| arg.starts_with(short));
        let (short, name) = found.ok_or_else(unknown)?;
        let rest = &arg[short.len()..];
        return Ok((name, (!rest.is_empty()).then(|| rest.trim_start_matches('=').to_owned())));
    };
    let (written, value) = long.split_once('=').map_or((long, None), |(n, v)| (n, Some(v.to_owned())));
    let written = written.replace('_', "-");
    let all = || VALUES.iter().chain(FLAGS);
    if let Some(name) = all().find(|name| **name == written) {
        return Ok((name, value));
    }
    let mut near = all().filter(|name| name.starts_with(&written) && !written.is_empty());
    match (near.next(), near.next()) {
        (Some(name), None) => Ok((name, value)),
        (Some(one), Some(two)) => Err(format!("`{}` may be `--{one}` or `--{two}`", arg.escape_debug())),
        (None, _) => Err(unknown()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Given, String> {
        read(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_as_torchruns_parser_takes_them() {
        let mut given =
            of("torchrun --nproc_per_node=2 --nnodes 1:4 --stand -m -t3 --max-r 5 pkg.train --nnodes 9 -- x")
                .expect("read");
        assert_eq!(given.program, ["pkg.train", "--nnodes", "9", "--", "x"]);
        assert_eq!(given.value("nnodes").as_deref(), Some("1:4"));
        assert_eq!(given.value("nnodes"), None);
        assert_eq!(given.value("nproc-per-node").as_deref(), Some("2"));
        assert_eq!(given.value("tee").as_deref(), Some("3"));
        assert_eq!(given.value("max-restarts").as_deref(), Some("5"));
        assert!(given.flag("standalone") && given.flag("module") && !given.flag("run-path"));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("", "no script"),
            ("--nnodes", "needs a value"),
            ("--nnodes 2", "no script"),
            ("--frobnicate a.py", "no option `--frobnicate`"),
            ("--n a.py", "may be"),
            ("--standalone=1 a.py", "takes no value"),
            ("-x a.py", "no option `-x`"),
        ] {
            let message = of(text).expect_err(text);
            assert!(message.contains(part), "{text}: {message}");
        }
    }
}
