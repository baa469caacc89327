from parts import objects, step_of

model, optimizer, loader = objects()
train_on = step_of(model, optimizer)

...  # fragment 1
