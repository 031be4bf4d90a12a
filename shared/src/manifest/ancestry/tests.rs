use proptest::prelude::*;

use super::*;
use crate::manifest::tests::{field, table};
use crate::portable::PortableType;

/// What one transition does.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Class 2: another table.
    Table,
    /// Class 3: a field of this table, by its index modulo the tables there are.
    Field(usize),
    /// Class 4: this table has another key.
    Key(usize),
}

/// The manifests of these transitions from one of one table, the oldest first, and the id of the table that each touched.
fn lineage(steps: &[Step]) -> (Vec<Manifest>, Vec<String>) {
    let mut tables = vec![table("t0")];
    let mut manifests = vec![Manifest::initial(tables.clone()).unwrap()];
    let mut touched = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        let index = match step {
            Step::Table => {
                tables.push(table(&format!("t{}", tables.len())));
                tables.len() - 1
            }
            Step::Field(index) => {
                let index = index % tables.len();
                tables[index].fields.push(field(&format!("new{number}"), PortableType::Int));
                index
            }
            Step::Key(index) => {
                let index = index % tables.len();
                let other = if tables[index].primary_key_field_id == "id" { "at" } else { "id" };
                tables[index].primary_key_field_id = other.into();
                index
            }
        };
        touched.push(tables[index].table_id.clone());
        manifests.push(manifests.last().unwrap().successor(tables.clone()).unwrap().unwrap());
    }
    (manifests, touched)
}

fn ancestry(manifests: &[Manifest]) -> Ancestry {
    let (current, older) = manifests.split_last().unwrap();
    let mut ancestry = Ancestry::of(current.clone());
    for manifest in older.iter().rev() {
        ancestry.follow(manifest.clone());
    }
    ancestry
}

fn compatible(affected: &[&str]) -> Descent {
    Descent::Compatible { affected: Arc::new(affected.iter().map(|id| (*id).to_owned()).collect()) }
}

#[test]
fn class_2_alone_affects_no_table() {
    let (manifests, _) = lineage(&[Step::Table, Step::Table]);
    let ancestry = ancestry(&manifests);
    for manifest in &manifests[..2] {
        assert_eq!(ancestry.descent(&manifest.reference()), Some(&compatible(&[])));
        assert_eq!(ancestry.descent_of(&manifest.hash()), Some(&compatible(&[])));
    }
}

#[test]
fn class_3_affects_the_tables_of_every_transition_on_the_way() {
    let (manifests, _) = lineage(&[Step::Table, Step::Field(0), Step::Field(1), Step::Table]);
    let ancestry = ancestry(&manifests);
    let expected = [compatible(&["t0", "t1"]), compatible(&["t0", "t1"]), compatible(&["t1"]), compatible(&[])];
    for (manifest, expected) in manifests.iter().zip(&expected) {
        assert_eq!(ancestry.descent(&manifest.reference()), Some(expected));
    }
}

#[test]
fn class_4_anywhere_on_the_way_is_incompatible() {
    let (manifests, _) = lineage(&[Step::Table, Step::Key(0), Step::Field(1)]);
    let ancestry = ancestry(&manifests);
    let expected = [Descent::Incompatible, Descent::Incompatible, compatible(&["t1"])];
    for (manifest, expected) in manifests.iter().zip(&expected) {
        assert_eq!(ancestry.descent(&manifest.reference()), Some(expected));
    }
}

#[test]
fn only_the_exact_references_of_ancestors_are_known() {
    let (manifests, _) = lineage(&[Step::Table, Step::Field(0)]);
    let (others, _) = lineage(&[Step::Field(0), Step::Table]);
    let mut ancestry = Ancestry::of(manifests[2].clone());
    // Published, but not what the current one descends from.
    ancestry.follow(others[1].clone());
    assert_eq!(ancestry.awaited(), Some(manifests[1].reference()));
    ancestry.follow(manifests[1].clone());
    let known = manifests[1].reference();
    assert!(ancestry.descent(&known).is_some());
    assert_eq!(ancestry.descent(&SchemaReference { version: known.version + 1, ..known }), None);
    assert_eq!(ancestry.descent(&others[1].reference()), None);
    assert_eq!(ancestry.descent_of(&others[1].hash()), None);
    assert_eq!(ancestry.descent(&manifests[0].reference()), None, "not handed over");
    assert_eq!(ancestry.descent(&manifests[2].reference()), None, "the current one is no ancestor");
}

/// A published class that today's rules would not give.
fn published_as(parent: &Manifest, tables: Vec<super::super::Table>, class: TransitionClass) -> Manifest {
    super::super::Document {
        schema_version: parent.version() + 1,
        schema_hash: SchemaHash::new([0; 32]),
        parent_schema: Some(parent.reference()),
        transition_class: class,
        compatibility_floor: parent.version() + 1,
        tables,
    }
    .seal()
    .unwrap()
}

#[test]
fn the_stronger_of_the_published_class_and_what_the_tables_say_counts() {
    let first = Manifest::initial(vec![table("t0"), table("t1")]).unwrap();
    let descent = |class, change: fn(&mut Vec<super::super::Table>)| {
        let mut tables = first.tables().to_vec();
        change(&mut tables);
        let mut ancestry = Ancestry::of(published_as(&first, tables, class));
        ancestry.follow(first.clone());
        ancestry.descent(&first.reference()).unwrap().clone()
    };
    assert_eq!(descent(TransitionClass::Class4, |t| t.push(table("t2"))), Descent::Incompatible);
    assert_eq!(descent(TransitionClass::Class3, |t| t.push(table("t2"))), compatible(&["t0", "t1"]));
    let widened: fn(&mut Vec<super::super::Table>) = |t| t[1].fields.push(field("new", PortableType::Int));
    assert_eq!(descent(TransitionClass::Class2, widened), compatible(&["t1"]));
    assert_eq!(descent(TransitionClass::Class2, |t| t.truncate(1)), Descent::Incompatible);
}

#[test]
fn ancestors_are_bounded() {
    let steps = vec![Step::Table; 3];
    let (manifests, _) = lineage(&steps);
    let mut ancestry = ancestry(&manifests[1..]);
    assert_eq!(ancestry.awaited(), Some(manifests[0].reference()));
    let filler = (ancestry.ancestors.len()..MAX_ANCESTORS).map(|number| {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.to_be_bytes());
        (SchemaHash::new(hash), (1, Descent::Incompatible))
    });
    ancestry.ancestors.extend(filler);
    assert_eq!(ancestry.awaited(), None);
    ancestry.follow(manifests[0].clone());
    assert_eq!(ancestry.descent(&manifests[0].reference()), None);
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Table),
        4 => (0_usize..4).prop_map(Step::Field),
        1 => (0_usize..4).prop_map(Step::Key),
    ]
}

proptest! {
    /// The model knows the transitions and looks at no manifest.
    #[test]
    fn descents_agree_with_the_transitions_that_were_made(steps in prop::collection::vec(step(), 0..10)) {
        let (manifests, touched) = lineage(&steps);
        let ancestry = ancestry(&manifests);
        for (from, manifest) in manifests[..steps.len()].iter().enumerate() {
            let expected = if steps[from..].iter().any(|step| matches!(step, Step::Key(_))) {
                Descent::Incompatible
            } else {
                let fields = (from..steps.len()).filter(|index| matches!(steps[*index], Step::Field(_)));
                Descent::Compatible { affected: Arc::new(fields.map(|index| touched[index].clone()).collect()) }
            };
            prop_assert_eq!(ancestry.descent(&manifest.reference()), Some(&expected));
            prop_assert_eq!(ancestry.descent_of(&manifest.hash()), Some(&expected));
        }
        prop_assert_eq!(ancestry.awaited(), None);
    }
}
