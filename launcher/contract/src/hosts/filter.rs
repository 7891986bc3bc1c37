//! DeepSpeed's filters: `worker-0@worker-1:0,2` includes (or excludes) all of worker-0 and two slots of worker-1.
use super::expand;
use std::collections::{BTreeMap, HashMap};

/// Most slots that a filter may number.
const MAX_SLOT: u32 = 1023;

/// Which slots of a host are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slots {
    /// As many as the job says or the host has.
    Auto,
    /// The first so many.
    Count(u32),
    /// These, ascending; never empty.
    These(Vec<u32>),
}

impl Slots {
    /// How many, where that is known without asking the host.
    pub fn count(&self) -> Option<u32> {
        match self {
            Slots::Auto => None,
            Slots::Count(n) => Some(*n),
            Slots::These(list) => Some(list.len() as u32),
        }
    }
}

/// A host that is left, by its number in what was given.
pub type Filtered = (usize, Slots);

/// What is wrong with the filters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterFault {
    /// In `exclude`, not in `include`.
    pub exclude: bool,
    /// Number of the text in its list; `None`: all of them together.
    pub item: Option<usize>,
    pub message: String,
}

/// Host → slots; an empty set means all of it.
type Named = BTreeMap<usize, Vec<u32>>;

/// Applies the filters to hosts, given by name with their slots; their order stays.
///
/// A host may be named with the port it was given with (`a:2222`); what else stands after a colon are slots.
pub fn filter(
    hosts: &[(String, Slots)],
    include: &[String],
    exclude: &[String],
) -> Result<Vec<Filtered>, FilterFault> {
    let whole = |exclude, message: &str| FilterFault { exclude, item: None, message: message.to_owned() };
    if !include.is_empty() && !exclude.is_empty() {
        return Err(whole(true, "can't be given beside `cluster.include`: each names what is left"));
    }
    let is_exclude = include.is_empty();
    // A filter may name as many hosts as there are: each is looked up at once. A name that is there twice is the first of its hosts.
    let by_name: HashMap<&str, usize> =
        hosts.iter().enumerate().rev().map(|(index, (host, _))| (host.as_str(), index)).collect();
    let mut named = Named::new();
    for (item, text) in include.iter().chain(exclude).enumerate() {
        let fault = |message| FilterFault { exclude: is_exclude, item: Some(item), message };
        name(hosts, &by_name, text, &mut named).map_err(fault)?;
    }
    let mut left = Vec::new();
    for (index, (host, slots)) in hosts.iter().enumerate() {
        let picked = named.get(&index).map(Vec::as_slice);
        let kept = match (is_exclude, picked) {
            (true, None) | (false, Some([])) => Some(slots.clone()),
            (true, Some([])) | (false, None) => None,
            (false, Some(these)) => Some(Slots::These(these.to_vec())),
            (true, Some(these)) => {
                let all = numbers(slots).ok_or_else(|| {
                    let message = format!("leaves out slots of {host}, which doesn't say how many it has");
                    whole(true, &format!("{message}: write `{host} slots=N` in a hostfile"))
                })?;
                let rest: Vec<u32> = all.into_iter().filter(|slot| !these.contains(slot)).collect();
                (!rest.is_empty()).then_some(Slots::These(rest))
            }
        };
        left.extend(kept.map(|slots| (index, slots)));
    }
    match left.is_empty() && !hosts.is_empty() {
        true => Err(whole(is_exclude, "leaves no host")),
        false => Ok(left),
    }
}

fn numbers(slots: &Slots) -> Option<Vec<u32>> {
    match slots {
        Slots::Auto => None,
        Slots::Count(n) => Some((0..*n).collect()),
        Slots::These(list) => Some(list.clone()),
    }
}

/// Adds what one text names.
fn name(
    hosts: &[(String, Slots)],
    by_name: &HashMap<&str, usize>,
    text: &str,
    named: &mut Named,
) -> Result<(), String> {
    for part in text.split('@') {
        let known = |name: &str| by_name.get(name).copied();
        let (names, slots) = match known(part) {
            Some(_) => (part, None),
            None => part.rsplit_once(':').map_or((part, None), |(name, slots)| (name, Some(slots))),
        };
        let slots = slots.map_or(Ok(Vec::new()), slot_list)?;
        for name in expand_name(names)? {
            let Some(index) = known(&name) else {
                return Err(format!("names the host `{}`, which the job doesn't have", name.escape_debug()));
            };
            add(&hosts[index], index, &slots, named)?;
        }
    }
    Ok(())
}

fn expand_name(text: &str) -> Result<Vec<String>, String> {
    match text {
        "" => Err("has an empty host name: hosts are separated by one `@`".to_owned()),
        _ if text.matches(':').count() > 1 => Ok(vec![text.to_owned()]),
        _ => expand(text).map_err(|f| f.message),
    }
}

fn add(
    (host, slots): &(String, Slots),
    index: usize,
    these: &[u32],
    named: &mut Named,
) -> Result<(), String> {
    if let Some(has) = numbers(slots)
        && let Some(lacks) = these.iter().find(|slot| !has.contains(slot))
    {
        return Err(format!("names slot {lacks} of {host}, which has {} slots", has.len()));
    }
    match named.get_mut(&index) {
        None => _ = named.insert(index, these.to_vec()),
        Some(before) if before.is_empty() != these.is_empty() => {
            return Err(format!("names {host} once with slots and once without"));
        }
        Some(before) => {
            before.extend(these);
            before.sort_unstable();
            before.dedup();
        }
    }
    Ok(())
}

/// `0,2-3`.
fn slot_list(text: &str) -> Result<Vec<u32>, String> {
    let mut slots = Vec::new();
    for part in text.split(',') {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            text.parse::<u32>().ok().filter(|n| digits && *n <= MAX_SLOT)
        };
        match (number(low), number(high)) {
            (Some(low), Some(high)) if low <= high => slots.extend(low..=high),
            _ => {
                let what = format!("slots are numbers from 0 to {MAX_SLOT}, as in `node-1:0,2`");
                return Err(format!("has the slots `{}`: {what}", text.escape_debug()));
            }
        }
        if slots.len() > 4 * MAX_SLOT as usize {
            return Err("names the same slots again and again".to_owned());
        }
    }
    slots.sort_unstable();
    slots.dedup();
    Ok(slots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hosts() -> Vec<(String, Slots)> {
        let host = |name: &str, slots| (name.to_owned(), slots);
        vec![
            host("worker-0", Slots::Count(4)),
            host("worker-1", Slots::Count(2)),
            host("c:2222", Slots::Auto),
        ]
    }

    fn of(include: &[&str], exclude: &[&str]) -> Result<String, FilterFault> {
        let own = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        let left = filter(&hosts(), &own(include), &own(exclude))?;
        let one = |(index, slots): Filtered| {
            let slots = match slots {
                Slots::Auto => "auto".to_owned(),
                Slots::Count(n) => format!("{n}"),
                Slots::These(list) => format!("{list:?}"),
            };
            format!("{index}={slots}")
        };
        Ok(left.into_iter().map(one).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn filters_are_deepspeeds() {
        for (include, exclude, expected) in [
            (&[][..], &[][..], "0=4 1=2 2=auto"),
            (&["worker-0@worker-1:0,1"], &[], "0=4 1=[0, 1]"),
            (&["worker-1:1", "worker-0:2-3,0"], &[], "0=[0, 2, 3] 1=[1]"),
            (&["c:2222"], &[], "2=auto"),
            (&["c:2222:1"], &[], "2=[1]"),
            (&["worker-[0-1]:0"], &[], "0=[0] 1=[0]"),
            (&[], &["worker-1:0"], "0=4 1=[1] 2=auto"),
            (&[], &["worker-1:0,1@c:2222"], "0=4"),
            (&[], &["worker-1"], "0=4 2=auto"),
        ] {
            assert_eq!(of(include, exclude).as_deref(), Ok(expected), "{include:?} {exclude:?}");
        }
    }

    #[test]
    fn what_is_not_there_is_refused() {
        for (include, exclude, part) in [
            (&["worker-2"][..], &[][..], "`worker-2`"),
            (&["worker-1:2"], &[], "slot 2 of worker-1"),
            (&["worker-1:x"], &[], "slots are numbers"),
            (&["worker-1@"], &[], "empty host name"),
            (&["worker-1:0@worker-1"], &[], "once with slots"),
            (&["worker-0"], &["worker-1"], "beside"),
            (&[], &["c:2222:1"], "how many"),
            (&[], &["worker-0@worker-1@c:2222"], "leaves no host"),
        ] {
            let fault = of(include, exclude).expect_err(part);
            assert!(fault.message.contains(part), "{fault:?}");
        }
    }

    /// Each filter looks a name up; none walks the list for each name.
    #[test]
    fn ten_thousand_hosts_are_filtered_at_once() {
        const HOSTS: usize = 10_000;
        let many: Vec<(String, Slots)> = (0..HOSTS).map(|i| (format!("n{i}"), Slots::Count(8))).collect();
        let each: Vec<String> = (0..HOSTS - 1).map(|i| format!("n{i}")).collect();
        let slots: Vec<String> = (0..HOSTS).map(|i| format!("n{i}:0-2,7")).collect();
        let began = std::time::Instant::now();
        assert_eq!(filter(&many, &each, &[]).map(|left| left.len()), Ok(HOSTS - 1));
        assert_eq!(filter(&many, &[each.join("@")], &[]).map(|left| left.len()), Ok(HOSTS - 1));
        assert_eq!(filter(&many, &[], &each), Ok(vec![(HOSTS - 1, Slots::Count(8))]));
        let left = filter(&many, &[], &slots).expect("slots are left");
        assert!(left.len() == HOSTS && left[9].1 == Slots::These(vec![3, 4, 5, 6]));
        assert_eq!(filter(&many, &["n[0-9999]:1".to_owned()], &[]).map(|left| left.len()), Ok(HOSTS));
        // Far more than it takes; one look at all hosts for each name takes longer than this.
        assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
    }

    proptest! {
        /// Including slots and excluding them split a host in two.
        #[test]
        fn include_and_exclude_are_complements(picked in proptest::collection::btree_set(0u32..4, 1..4)) {
            let text = picked.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            let only = [("h".to_owned(), Slots::Count(4))];
            let list = [format!("h:{text}")];
            let (with, without) = (filter(&only, &list, &[]), filter(&only, &[], &list));
            let slots = |left: Result<Vec<Filtered>, FilterFault>| {
                left.ok().and_then(|l| l.into_iter().next()).and_then(|(_, s)| numbers(&s)).unwrap_or_default()
            };
            let mut all = slots(with);
            all.extend(slots(without));
            all.sort_unstable();
            prop_assert_eq!(all, vec![0, 1, 2, 3]);
        }

        #[test]
        fn any_text_does_no_harm(text in "[a-cw0-9@:,\\[\\]\\-]{0,40}") {
            _ = filter(&hosts(), &[text], &[]);
        }
    }
}
