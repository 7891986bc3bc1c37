//! Applies DeepSpeed's filters of hosts: `worker-0@worker-1:0,2` includes (or excludes) worker-0
//! and two slots of worker-1.
use super::{
    error::{FilterError, FilterProblem},
    limits::MAX_SLOT_NUMBER,
    range::expand_ranges,
};
use std::collections::{BTreeMap, HashMap};

/// The slots (places of workers) of one host that a job uses: all, the first ones, or selected
/// ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostSlots {
    /// All slots of the host. Their number follows from the job or from the hardware of the host.
    Auto,
    /// The slots with the numbers from 0 to one less than this value.
    Count(u32),
    /// The slots with these numbers, in ascending order; never empty.
    Selected(Vec<u32>),
}

impl HostSlots {
    /// Returns the number of slots (places of workers) of the host that the job uses; `None` if the
    /// user has not given a number.
    pub fn count(&self) -> Option<u32> {
        match self {
            HostSlots::Auto => None,
            HostSlots::Count(n) => Some(*n),
            HostSlots::Selected(list) => Some(list.len() as u32),
        }
    }
}

/// A host that passed the filters: its index in the list of all hosts, and its selected slots
/// (places of workers).
pub type SelectedHost = (usize, HostSlots);

/// The slots (places of workers) that filters of hosts select on each host, with the host's index
/// in the list of all hosts as the key. An empty list stands for all slots.
type SlotsByHostIndex = BTreeMap<usize, Vec<u32>>;

/// Selects the hosts that the filters `include` name; without such filters, selects all hosts
/// except those that the filters `exclude` name. Each host is given by name and slots. Returns the
/// remaining hosts in the order of `hosts`.
///
/// A filter names a host by its whole name, including the port (`a:2222`). A further colon
/// introduces slots. Fails if `include` and `exclude` both contain filters, if a filter is not
/// valid, or if no host remains.
pub fn filter_hosts(
    hosts: &[(String, HostSlots)],
    include: &[String],
    exclude: &[String],
) -> Result<Vec<SelectedHost>, FilterError> {
    let error = |exclude, problem| FilterError { exclude, item: None, problem };
    if !include.is_empty() && !exclude.is_empty() {
        return Err(error(true, FilterProblem::IncludeAndExclude));
    }
    let is_exclude = include.is_empty();
    // A filter may name every host, so names are looked up in a map. A duplicate name stands for
    // its first host.
    let by_name: HashMap<&str, usize> =
        hosts.iter().enumerate().rev().map(|(index, (host, _))| (host.as_str(), index)).collect();
    let mut named = SlotsByHostIndex::new();
    for (item, text) in include.iter().chain(exclude).enumerate() {
        let in_item = |problem| FilterError { exclude: is_exclude, item: Some(item), problem };
        parse_filter(hosts, &by_name, text, &mut named).map_err(in_item)?;
    }
    let mut left = Vec::new();
    for (index, (host, slots)) in hosts.iter().enumerate() {
        let picked = named.get(&index).map(Vec::as_slice);
        let kept = match (is_exclude, picked) {
            (true, None) | (false, Some([])) => Some(slots.clone()),
            (true, Some([])) | (false, None) => None,
            (false, Some(these)) => Some(HostSlots::Selected(these.to_vec())),
            (true, Some(these)) => {
                let host_slots = list_slot_numbers(slots)
                    .ok_or_else(|| error(true, FilterProblem::SlotCountUnknown(host.clone())))?;
                let rest: Vec<u32> = host_slots.into_iter().filter(|slot| !these.contains(slot)).collect();
                (!rest.is_empty()).then_some(HostSlots::Selected(rest))
            }
        };
        left.extend(kept.map(|slots| (index, slots)));
    }
    match left.is_empty() && !hosts.is_empty() {
        true => Err(error(is_exclude, FilterProblem::NothingLeft)),
        false => Ok(left),
    }
}

/// Lists the numbers, counted from 0, of the slots (places of workers) that a job uses on a host;
/// `None` if the user has not given a number.
fn list_slot_numbers(slots: &HostSlots) -> Option<Vec<u32>> {
    match slots {
        HostSlots::Auto => None,
        HostSlots::Count(n) => Some((0..*n).collect()),
        HostSlots::Selected(list) => Some(list.clone()),
    }
}

/// Parses one filter of hosts, such as `worker-0@worker-1:0,2`, and adds its hosts with their slots
/// (places of workers) to `named`. `by_name` contains the index in `hosts` of each host name. Fails
/// if `hosts` lacks a host or a slot.
fn parse_filter(
    hosts: &[(String, HostSlots)],
    by_name: &HashMap<&str, usize>,
    text: &str,
    named: &mut SlotsByHostIndex,
) -> Result<(), FilterProblem> {
    for part in text.split('@') {
        let known = |name: &str| by_name.get(name).copied();
        let (names, slots) = match known(part) {
            Some(_) => (part, None),
            None => part.rsplit_once(':').map_or((part, None), |(name, slots)| (name, Some(slots))),
        };
        let slots = slots.map_or(Ok(Vec::new()), parse_slots)?;
        for name in expand_host_name(names)? {
            let Some(index) = known(&name) else {
                return Err(FilterProblem::HostUnknown(name));
            };
            add_slots(&hosts[index], index, &slots, named)?;
        }
    }
    Ok(())
}

/// Expands the ranges in `text`, a host name such as `n[1-2]`, and returns the resulting names. An
/// IPv6 address is returned unchanged, because its brackets are not ranges.
fn expand_host_name(text: &str) -> Result<Vec<String>, FilterProblem> {
    match text {
        "" => Err(FilterProblem::HostEmpty),
        _ if text.matches(':').count() > 1 => Ok(vec![text.to_owned()]),
        _ => expand_ranges(text).map_err(|error| FilterProblem::HostInvalid(error.problem)),
    }
}

/// Adds the slots (places of workers) `these` of one host to the selection `named`, which a filter
/// of hosts builds. `index` is the index of the host in the list of hosts. An empty list stands for
/// all slots. Fails if the host lacks one of the slots, or if filters name the host both with and
/// without slots.
fn add_slots(
    (host, slots): &(String, HostSlots),
    index: usize,
    these: &[u32],
    named: &mut SlotsByHostIndex,
) -> Result<(), FilterProblem> {
    if let Some(available) = list_slot_numbers(slots)
        && let Some(slot) = these.iter().find(|slot| !available.contains(slot))
    {
        return Err(FilterProblem::SlotMissing { slot: *slot, host: host.clone(), slots: available.len() });
    }
    match named.get_mut(&index) {
        None => _ = named.insert(index, these.to_vec()),
        Some(before) if before.is_empty() != these.is_empty() => {
            return Err(FilterProblem::SlotsAmbiguous(host.clone()));
        }
        Some(before) => {
            before.extend(these);
            before.sort_unstable();
            before.dedup();
        }
    }
    Ok(())
}

/// Parses the numbers of slots (places of workers) in a filter of hosts, such as `0,2-3`, into
/// ascending numbers without duplicates.
fn parse_slots(text: &str) -> Result<Vec<u32>, FilterProblem> {
    let mut slots = Vec::new();
    for part in text.split(',') {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            text.parse::<u32>().ok().filter(|n| digits && *n <= MAX_SLOT_NUMBER)
        };
        match (number(low), number(high)) {
            (Some(low), Some(high)) if low <= high => slots.extend(low..=high),
            _ => return Err(FilterProblem::SlotsInvalid(text.to_owned())),
        }
        if slots.len() > 4 * MAX_SLOT_NUMBER as usize {
            return Err(FilterProblem::TooManySlots);
        }
    }
    slots.sort_unstable();
    slots.dedup();
    Ok(slots)
}

#[cfg(test)]
mod tests {
    use super::{FilterProblem::*, *};
    use proptest::prelude::*;

    /// Returns three hosts for tests, with 4, 2 and an unknown number of slots.
    fn hosts() -> Vec<(String, HostSlots)> {
        let host = |name: &str, slots| (name.to_owned(), slots);
        vec![
            host("worker-0", HostSlots::Count(4)),
            host("worker-1", HostSlots::Count(2)),
            host("c:2222", HostSlots::Auto),
        ]
    }

    /// Applies filters to the hosts of [`hosts()`], and formats the remaining hosts as
    /// `INDEX=SLOTS`, separated by spaces.
    fn format_filtered_hosts(include: &[&str], exclude: &[&str]) -> Result<String, FilterError> {
        let texts = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        let left = filter_hosts(&hosts(), &texts(include), &texts(exclude))?;
        let one = |(index, slots): SelectedHost| {
            let slots = match slots {
                HostSlots::Auto => "auto".to_owned(),
                HostSlots::Count(n) => format!("{n}"),
                HostSlots::Selected(list) => format!("{list:?}"),
            };
            format!("{index}={slots}")
        };
        Ok(left.into_iter().map(one).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn filters_select_as_in_deepspeed() {
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
            assert_eq!(
                format_filtered_hosts(include, exclude).as_deref(),
                Ok(expected),
                "{include:?} {exclude:?}"
            );
        }
    }

    #[test]
    fn filters_that_do_not_apply_are_rejected() {
        let text = str::to_owned;
        for (include, exclude, problem) in [
            (&["worker-2"][..], &[][..], HostUnknown(text("worker-2"))),
            (&["worker-1:2"], &[], SlotMissing { slot: 2, host: text("worker-1"), slots: 2 }),
            (&["worker-1:x"], &[], SlotsInvalid(text("x"))),
            (&["worker-1@"], &[], HostEmpty),
            (&["worker-1:0@worker-1"], &[], SlotsAmbiguous(text("worker-1"))),
            (&["worker-0"], &["worker-1"], IncludeAndExclude),
            (&[], &["c:2222:1"], SlotCountUnknown(text("c:2222"))),
            (&[], &["worker-0@worker-1@c:2222"], NothingLeft),
        ] {
            assert_eq!(format_filtered_hosts(include, exclude).map_err(|error| error.problem), Err(problem));
        }
    }

    /// Checks that filtering 10 000 hosts does not take quadratic time.
    #[test]
    fn ten_thousand_hosts_are_filtered_quickly() {
        const HOSTS: usize = 10_000;
        let many: Vec<(String, HostSlots)> =
            (0..HOSTS).map(|i| (format!("n{i}"), HostSlots::Count(8))).collect();
        let each: Vec<String> = (0..HOSTS - 1).map(|i| format!("n{i}")).collect();
        let slots: Vec<String> = (0..HOSTS).map(|i| format!("n{i}:0-2,7")).collect();
        let began = std::time::Instant::now();
        assert_eq!(filter_hosts(&many, &each, &[]).map(|left| left.len()), Ok(HOSTS - 1));
        assert_eq!(filter_hosts(&many, &[each.join("@")], &[]).map(|left| left.len()), Ok(HOSTS - 1));
        assert_eq!(filter_hosts(&many, &[], &each), Ok(vec![(HOSTS - 1, HostSlots::Count(8))]));
        let left = filter_hosts(&many, &[], &slots).expect("slots are left");
        assert!(left.len() == HOSTS && left[9].1 == HostSlots::Selected(vec![3, 4, 5, 6]));
        assert_eq!(filter_hosts(&many, &["n[0-9999]:1".to_owned()], &[]).map(|left| left.len()), Ok(HOSTS));
        // The limit is generous; a linear search per name would exceed it.
        assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
    }

    proptest! {
        /// Checks that including slots and excluding the same slots divide a host into two disjoint
        /// parts.
        #[test]
        fn include_and_exclude_are_complements(picked in proptest::collection::btree_set(0u32..4, 1..4)) {
            let text = picked.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            let only = [("h".to_owned(), HostSlots::Count(4))];
            let list = [format!("h:{text}")];
            let (with, without) = (filter_hosts(&only, &list, &[]), filter_hosts(&only, &[], &list));
            let slots = |left: Result<Vec<SelectedHost>, FilterError>| {
                left.ok().and_then(|l| l.into_iter().next()).and_then(|(_, s)| list_slot_numbers(&s)).unwrap_or_default()
            };
            let mut both = slots(with);
            both.extend(slots(without));
            both.sort_unstable();
            prop_assert_eq!(both, vec![0, 1, 2, 3]);
        }

        #[test]
        fn any_filter_is_applied_or_rejected(text in "[a-cw0-9@:,\\[\\]\\-]{0,40}") {
            _ = filter_hosts(&hosts(), &[text], &[]);
        }
    }
}
