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

#[cfg(test)]
mod tests {
    use crate::{Request, Role, Source, external::open};
    use serde_json::{Map, json};

    /// A folder of weights: names and shapes, whose elements count up from 0 in each tensor.
    fn folder(tensors: &[(&str, &[u64])]) -> tempfile::TempDir {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, shape) in tensors {
            let begin = data.len();
            let count = shape.iter().product::<u64>();
            data.extend((0..count).flat_map(|i| (i as f32).to_le_bytes()));
            let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
            header.insert((*name).into(), entry);
        }
        let header = serde_json::to_vec(&header).expect("JSON");
        let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
        let place = tempfile::tempdir().expect("a folder");
        std::fs::write(place.path().join("model.safetensors"), file).expect("written");
        place
    }

    #[test]
    fn experts_are_listed_unless_they_are_there_both_ways() {
        let expert = |m: &str, shape: &[u64]| {
            (0..2).map(|e| (format!("l.mlp.experts.{e}.{m}.weight"), shape.to_vec())).collect::<Vec<_>>()
        };
        let matrices = [("gate_proj", [3, 2]), ("up_proj", [3, 2]), ("down_proj", [2, 3])];
        let wanted: Vec<_> = matrices.iter().flat_map(|(m, shape)| expert(m, shape)).collect();
        let fused: [(&str, &[u64]); 2] =
            [("l.mlp.experts.gate_up_proj", &[2, 6, 2]), ("l.mlp.experts.down_proj", &[2, 2, 3])];
        let both = [fused[0], fused[1], ("l.mlp.experts.1.up_proj.weight", &[3, 2])];
        for (tensors, replaced) in [(&fused[..], true), (&both[..], false)] {
            let place = folder(tensors);
            let mut source = open(place.path()).expect("sound").expect("weights");
            source.list_experts(&wanted);
            let names: Vec<String> = source.tensors().into_iter().map(|t| t.name).collect();
            assert_eq!(names.contains(&fused[0].0.to_owned()), !replaced, "{names:?}");
            let (mut out, name) = ([0.0; 6], "l.mlp.experts.1.up_proj.weight");
            let request = Request { name, role: Role::Weight, start_element: 0, out: &mut out };
            source.read_many(&mut [request]).expect("read");
            let first = if replaced { 18.0 } else { 0.0 };
            assert_eq!(out, std::array::from_fn(|i| first + i as f32));
        }
    }
}
