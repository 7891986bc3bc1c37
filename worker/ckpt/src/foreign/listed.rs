//! Experts that a program trained as one tensor of a layer, listed one by one.
use super::{Entry, Foreign, ForeignFacts, Part};
use crate::cut;
use crate::formats::experts::{Fused, Member};

impl Foreign {
    /// Gives the experts of a layer that it has as one tensor the names that `weights` (names and shapes) lists, one by one, and
    /// their states with them; the layer's other weights are then called as they are there, too. What it lists itself stays, and
    /// so does a tensor that it has both ways: whoever looks for the names then finds one that is nobody's.
    pub fn list_experts(&mut self, weights: &[(String, Vec<u64>)]) {
        let weights: Vec<_> = weights.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
        let Some(fused) = Fused::of(&weights) else { return };
        let has = |e: &Entry| fused.weights.iter().any(|(n, s)| *n == e.info.name && *s == e.info.shape);
        let twice = |e: &Entry, m: &Member| self.index.contains_key(&(e.info.role, m.name.clone()));
        let members = |e: &Entry| {
            let members = fused.members(&e.info.name).filter(|_| has(e))?;
            (!members.iter().any(|m| twice(e, m))).then_some(members)
        };
        let before = std::mem::take(&mut self.entries);
        for entry in before {
            match members(&entry) {
                Some(members) => self.entries.extend(members.iter().map(|m| one(&entry, m))),
                None => self.entries.push(entry),
            }
        }
        let keys = self.entries.iter().map(|e| (e.info.role, e.info.name.clone()));
        self.index = keys.zip(0..).collect();
        self.facts.list(&fused);
    }
}

/// An expert's part of a layer's tensor.
fn one(entry: &Entry, member: &Member) -> Entry {
    let mut info = entry.info.clone();
    (info.name, info.shape) = (member.name.clone(), member.shape.clone());
    let first = member.elements.start;
    let covered = cut::cover(&entry.parts, Part::elements, member.elements.clone());
    let parts = covered.map(|(i, range)| {
        let start = range.start - first;
        entry.parts[i].slice(range, start)
    });
    Entry { info, parts: parts.collect() }
}

impl ForeignFacts {
    fn list(&mut self, fused: &Fused) {
        let own = |name: &String| fused.own_names(name).collect::<Vec<_>>();
        let each = |names: &mut Vec<String>| *names = names.iter().flat_map(own).collect();
        self.groups.iter_mut().for_each(|g| each(&mut g.names));
        each(&mut self.frozen);
        let steps = std::mem::take(&mut self.steps);
        self.steps = steps.iter().flat_map(|(name, n)| own(name).into_iter().map(|own| (own, *n))).collect();
    }
}
